-- Whether a demand fits: `device_refusal` of shared.model.devices.device again, since a reservation is checked and
-- written in one step. And the totals and indexes of leases.
local constants = require('constants')
local layouts = require('layouts')
local records = require('records')
local server = require('server')
local values = require('values')
local D, N = layouts.DEVICE, layouts.NODE
local B, DEMAND = layouts.BOOKING, layouts.DEMAND
-- Each reservation reads these: a local takes less time than two look-ups.
local HELD, LAYOUT, MEMORY_MIB, SHARES, SLOT_MAP = D.HELD, D.LAYOUT, D.MEMORY_MIB, D.SHARES, D.SLOT_MAP
local IS_MIG, USED_CORES, USED_MIB = D.IS_MIG, D.USED_CORES, D.USED_MIB
local AMOUNTS, RESOURCES = N.AMOUNTS, N.RESOURCES
local EXCLUSIVE, BEST_EFFORT, IDLE_DEVICE = constants.EXCLUSIVE, constants.BEST_EFFORT, constants.IDLE_DEVICE
local MOST_SLOT = constants.MOST_SLOT
local DEVICE_BYTES, NODE_BYTES, AMOUNT_BYTES = 160, 48, 9 -- without texts, and of each amount, at most

local M = {}
local positions_by_names, amounts_by_resources
server.on_begin(function()
  positions_by_names, amounts_by_resources = {}, {}
  M.ends_by = nil -- when the lease that is being placed ends by its term at the latest; nil: it has none
end)

-- A slot map is a string of 0 and 1, one character per slot, cut off after the last one that is used.

function M.set_slot(device, slot, mark)
  local slot_map = device[SLOT_MAP]
  if slot == #slot_map then
    device[SLOT_MAP] = slot_map .. mark
    return
  end
  if slot > #slot_map then slot_map = slot_map .. string.rep('0', slot - #slot_map) end
  device[SLOT_MAP] = string.sub(slot_map, 1, slot) .. mark .. string.sub(slot_map, slot + 2)
end

-- Whether a lease has the slot.
function M.is_slot_used(device, slot) return string.sub(device[SLOT_MAP], slot + 1, slot + 1) == '1' end

-- Whether a lease has it, or what is held beyond leases.
function M.is_slot_taken(device, slot)
  return M.is_slot_used(device, slot)
    or device[HELD] ~= '' and string.sub(records.held_of(device).slots, slot + 1, slot + 1) == '1'
end

-- What leases use of a device, and what is held beyond them.
local function taken_of(device)
  if device[HELD] == '' then return device[USED_MIB], device[USED_CORES], device[SHARES] end
  local held = records.held_of(device)
  return device[USED_MIB] + held.memory_mib, device[USED_CORES] + held.cores_percent,
    device[SHARES] + held.shares
end
M.taken_of = taken_of

-- For each device of a demand its booking and its record, if there is one.
function M.each_device(demand)
  local bookings, i = demand[DEMAND.BOOKINGS], 0
  return function()
    i = i + 1
    if bookings[i] then return bookings[i], records.device_of(bookings[i][B.DEVICE]) end
  end
end

-- For each share of a demand: the UUID and the record of its device, the slot and the fence that it was
-- granted, and the number of its slot.
function M.each_share(demand, grants)
  local bookings, slots, i = demand[DEMAND.BOOKINGS], demand[DEMAND.SLOTS], -1
  return function()
    i = i + 2
    if not slots[i] then return nil end
    local uuid = bookings[slots[i]][B.DEVICE]
    return uuid, records.device_of(uuid), grants[i], grants[i + 1], slots[i + 1]
  end
end

-- Add the UUIDs of a demand's devices to a list.
function M.append_uuids(uuids, demand)
  local bookings = demand[DEMAND.BOOKINGS]
  for i = 1, #bookings do uuids[#uuids + 1] = bookings[i][B.DEVICE] end
end

function M.append_device_rows(rows, demand)
  for _, device in M.each_device(demand) do
    if device then rows[#rows + 1] = device end
  end
end

local function find_group(groups_text, group)
  return string.find(groups_text, '\n' .. group .. '\n', 1, true)
end

function M.has_group(device, groups_text)
  for group in string.gmatch(groups_text, '[^\n]+') do
    if find_group(device[D.GROUPS], group) then return true end
  end
  return false
end

local function changed_groups(known, groups_text, sign)
  for group in string.gmatch(groups_text, '[^\n]+') do
    if sign > 0 then
      known = (known == '' and '\n' or known) .. group .. '\n'
    else
      local from, to = find_group(known, group)
      if from then known = string.sub(known, 1, from) .. string.sub(known, to + 1) end
      if known == '\n' then known = '' end
    end
  end
  return known
end

function M.has_room_for_text(device, bytes)
  return DEVICE_BYTES + #device[D.UUID] + #device[D.NODE] + #device[SLOT_MAP] + #device[D.GROUPS]
    + #device[LAYOUT] + #device[D.MODE] + #device[HELD] + bytes <= constants.MOST_DEVICE_BYTES
end

-- Whether the names of these resources can be added to those of the node.
function M.has_room_for_resources(node, resources)
  local count, bytes = #node[AMOUNTS] / 2, #node[RESOURCES]
  for i = 1, #resources, 2 do count, bytes = count + 1, bytes + #resources[i] + 1 end
  return count <= constants.MOST_NODE_RESOURCES
    and NODE_BYTES + #node[N.NAME] + bytes + 2 * AMOUNT_BYTES * count <= constants.MOST_NODE_BYTES
end

-- Position of the capacity of each resource in a node's amounts; its amount in use is at the next position.
function M.resource_positions(node)
  local names = node[RESOURCES]
  if positions_by_names[names] then return positions_by_names[names] end
  local positions, at, last = {}, 1, #node[AMOUNTS]
  for name in string.gmatch(names, '[^\n]+') do
    if at < last then positions[name] = at end
    at = at + 2
  end
  positions_by_names[names] = positions
  return positions
end

function M.add_resource(node, name, room, used)
  local amounts = node[AMOUNTS]
  local at = #amounts + 1
  amounts[at], amounts[at + 1] = room, used
  node[RESOURCES] = node[RESOURCES] .. name .. '\n'
  return at
end

-- For each of `resources` its position (0: none), and its amount.
local function placed_amounts(resources, node)
  local by_names, names = amounts_by_resources[resources] or {}, node[RESOURCES]
  if by_names[names] then return by_names[names] end
  local amounts, positions = {}, M.resource_positions(node)
  for i = 1, #resources, 2 do
    amounts[i], amounts[i + 1] = positions[resources[i]] or 0, resources[i + 1]
  end
  by_names[names], amounts_by_resources[resources] = amounts, by_names
  return amounts
end
M.placed_amounts = placed_amounts

function M.add_to_node(node, resources, sign)
  local placed, amounts = placed_amounts(resources, node), node[AMOUNTS]
  for i = 1, #placed, 2 do
    local at, amount = placed[i], placed[i + 1]
    if at == 0 and amount ~= 0 then at = M.add_resource(node, resources[i], 0, 0) end
    if at > 0 then
      local used_at = at + 1
      amounts[used_at] = amounts[used_at] + sign * amount
    end
  end
  records.changed_nodes[node[N.NAME]] = true
end

local function add_amounts(device, memory, cores)
  device[USED_MIB] = device[USED_MIB] + memory
  device[USED_CORES] = device[USED_CORES] + cores
  records.changed_devices[device[D.UUID]] = true
end
M.add_amounts = add_amounts

-- Add a booking to the use of a device (sign 1), or subtract it (sign -1).
function M.add_to_device(device, sign, groups_text, booking)
  local _, memory, cores, shares, _, sharing, _, layout, mode = unpack(booking)
  add_amounts(device, sign * memory, sign * cores)
  device[SHARES] = device[SHARES] + sign * shares
  if sharing == EXCLUSIVE then device[D.EXCLUSIVE] = sign > 0 end
  if layout ~= '' and (sign > 0 or device[SHARES] == 0) then device[LAYOUT] = sign > 0 and layout or '' end
  if device[SHARES] == 0 then device[D.MODE] = '' elseif sign > 0 then device[D.MODE] = mode end
  if groups_text ~= '' then device[D.GROUPS] = changed_groups(device[D.GROUPS], groups_text, sign) end
end

-- Add a demand to the totals of its node and devices (sign 1), or subtract it (sign -1). What has no
-- record any more is left out: a lease must be able to end all the same.
function M.add_demand(demand, resources, groups_text, sign)
  local node = records.nodes[demand[DEMAND.NODE]]
  if node then M.add_to_node(node, resources, sign) end
  for _, booking in ipairs(demand[DEMAND.BOOKINGS]) do
    local device = records.devices[booking[B.DEVICE]]
    if device then M.add_to_device(device, sign, groups_text, booking) end
  end
end

-- Reasons are part of refusals, and so of messages about pods. Amounts below 0, and what is no number,
-- fit nowhere.

-- Whether so much is free of what every node has: a host port, of which what others use is its room, below 0; or a
-- resource as which pods are counted, without a limit.
local function has_unlisted(node, resources, i, at)
  local name, amount, amounts = resources[i], resources[i + 1], node[AMOUNTS]
  if string.find(name, constants.SELECTED_PREFIX, 1, true) == 1 then
    return amount > 0 and (at > 0 or M.has_room_for_resources(node, resources))
  end
  if string.find(name, constants.HOST_PORT_PREFIX, 1, true) ~= 1 then return false end
  local used = at > 0 and amounts[at + 1] - amounts[at] or 0
  return amount > 0 and used + amount <= constants.HOST_PORT_PARTS
    and (at > 0 or M.has_room_for_resources(node, resources))
end

function M.node_refusal(node, resources)
  if not node or node[N.STATUS] ~= 1 then return 'node-unknown' end
  local placed, amounts = placed_amounts(resources, node), node[AMOUNTS]
  for i = 1, #placed, 2 do
    local at, amount = placed[i], placed[i + 1]
    if amount ~= 0 and not (amount > 0 and at > 0 and amounts[at + 1] + amount <= amounts[at])
      and not has_unlisted(node, resources, i, at) then
      return 'resource:' .. resources[i]
    end
  end
end

-- Why the device is not available, or nil.
local function unavailable(device, node_name)
  if not device then return 'device-unknown' end
  if device[D.NODE] ~= node_name then return 'device-moved' end
  if device[D.STATUS] ~= 1 then
    return device[D.STATUS] == 2 and 'device-excluded' or 'device-unhealthy'
  end
end
M.unavailable = unavailable

-- Why a booking does not fit on a device, or nil. The order is that of shared.model.devices.device.device_refusal.
function M.device_refusal(device, node_name, groups_text, booking)
  local reason = unavailable(device, node_name)
  if reason then return reason end
  local _, memory, cores, shares, new_slots, policy, slots, layout, mode = unpack(booking)
  local slotted = new_slots > 0
  local memory_taken, cores_taken, shares_taken = taken_of(device)
  if device[IS_MIG] ~= (layout ~= '') then return 'mode' end
  if slotted and shares_taken + shares > (slots > 0 and slots or device[D.SLOTS]) then return 'slots' end
  if groups_text ~= '' and M.has_group(device, groups_text) then return 'anti-affinity' end
  if not (memory >= 0 and memory_taken + memory <= device[MEMORY_MIB]) then return 'memory' end
  if not (cores >= 0 and cores_taken + cores <= 100) then return 'cores' end
  if (policy == EXCLUSIVE or policy == IDLE_DEVICE) and shares_taken > 0 then return 'not-idle' end
  if device[D.EXCLUSIVE] or device[D.IS_CLAIMED] and not (M.ends_by and M.ends_by <= device[D.CLAIMED_UNTIL]) then
    return 'in-exclusive-use'
  end
  if cores_taken >= 100 and policy ~= BEST_EFFORT then return 'in-exclusive-use' end
  local held = shares_taken > device[SHARES] and records.held_of(device)
  if device[SHARES] > 0 and device[LAYOUT] ~= layout or held and held.layout ~= layout then return 'layout' end
  if device[SHARES] > 0 and device[D.MODE] ~= mode or held and held.mode ~= mode then return 'sharing-mode' end
  if groups_text ~= '' and not M.has_room_for_text(device, #groups_text + 2) then return 'record-size' end
  if slotted and #device[SLOT_MAP] + shares > MOST_SLOT then return 'slots' end
end

function M.demand_refusal(demand, resources, groups_text)
  local name = demand[DEMAND.NODE]
  local reason = M.node_refusal(records.node_of(name), resources)
  if reason then return reason end
  for booking, device in M.each_device(demand) do
    reason = M.device_refusal(device, name, groups_text, booking)
    if reason then return reason .. ' of ' .. booking[B.DEVICE] end
  end
  for uuid, device, _, _, number in M.each_share(demand, {}) do
    local position = -1 - number
    if position > MOST_SLOT or position >= 0 and M.is_slot_taken(device, position) then
      return 'position ' .. position .. ' of ' .. uuid
    end
  end
end

-- Have a reservation expire at an instant.
function M.expire_at(pod, expires_at)
  local pods = records.expiring[expires_at] or {}
  records.expiring[expires_at] = pods
  pods[#pods + 1] = pod
end

-- Add a new lease to the indexes of nodes and gangs.
function M.index_lease(pod, node, gang)
  if gang ~= '' then values.append(records.gang_members, 0, gang .. '|' .. pod) end
  local parts = records.lease_nodes
  local last = #parts
  parts[last + 1], parts[last + 2] = node[N.NUMBER], pod
end

return M
