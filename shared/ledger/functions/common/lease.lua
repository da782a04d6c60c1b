-- A lease, packed: numbers (see L); a slot (-1: none) and a fence per share; and two MessagePack arrays. The first, of
-- DESCRIPTION_BYTES, describes it: anti-affinity groups (each but the last before a line feed), resources as JSON
-- {name, amount, ...}, pod, gang, namespace, and what no function reads. The second is its demand: see `demand_at`.
-- EXPIRES: of a reservation, when it expires; later, when the lease became active, or 0.
local constants = require('constants')
local ledger = require('ledger')
local server = require('server')
local struct_pack, struct_unpack = struct.pack, struct.unpack
local parse_json, unpack_limit = cjson.decode, cmsgpack.unpack_limit
local MAY_BECOME = constants.MAY_BECOME
local FORMAT, GRANT_FORMAT = '<BddddI4I4', 'i4d'
local BYTES, GRANT_BYTES = 41, 12
local L = {
  STATE = 1, VERSION = 2, RESERVED_VERSION = 3, CREATED = 4, EXPIRES = 5, SHARE_COUNT = 6, DESCRIPTION_BYTES = 7,
}

-- A demand, the use of a lease on a node: {node, position of the last device field, DEVICE_FIELDS values per device
-- from FIRST_DEVICE on (uuid, MiB, cores, shares, new slots, sharing policy, slots that its dialect has (0: those of
-- the device), MIG layout), two values per share (number of the device, and number of the slot among its new ones; 0:
-- no slot; below 0: position -1 - value of the layout)}.
local FIRST_DEVICE, DEVICE_FIELDS = 3, 8

local M = {
  L = L, FORMAT = FORMAT, GRANT_FORMAT = GRANT_FORMAT, BYTES = BYTES, GRANT_BYTES = GRANT_BYTES,
  FIRST_DEVICE = FIRST_DEVICE, DEVICE_FIELDS = DEVICE_FIELDS,
}
local parsed_resources
server.on_begin(function() parsed_resources = {} end)

local function header_of(value) return {struct_unpack(FORMAT, value)} end
M.header_of = header_of

function M.with_header(header, value)
  return struct_pack(FORMAT, unpack(header, 1, L.DESCRIPTION_BYTES)) .. string.sub(value, BYTES + 1)
end

-- Advance a lease if the table in shared/model/leases/lease.py allows it; state and version change.
function M.change_state(header, to)
  if not MAY_BECOME[header[L.STATE]][to] then
    error('a lease in state ' .. header[L.STATE] .. ' cannot become ' .. to)
  end
  if header[L.STATE] == constants.RESERVED and to ~= constants.EXPIRED then header[L.EXPIRES] = 0 end
  if to == constants.ACTIVE then header[L.EXPIRES] = server.now_in_ms() / 1000 end
  header[L.STATE], header[L.VERSION] = to, ledger.next_version()
end

-- The slot and the fence of each share.
function M.grants_of(header, value)
  return {struct_unpack('<' .. string.rep(GRANT_FORMAT, header[L.SHARE_COUNT]), value, BYTES + 1)}
end

-- The device and the fence of a lease's first share, which no other lease has; nil without shares.
function M.first_grant(demand, grants)
  local number = demand[demand[2] + 1]
  if number then return demand[FIRST_DEVICE + (number - 1) * DEVICE_FIELDS], grants[2] end
end

-- The demand that the array at `at` (from 0) describes. One share: node, uuid, MiB, cores, slotted,
-- slots, sharing policy, and what no function reads. Else: node, false, the demand.
local function demand_at(text, at)
  local _, node, uuid, memory, cores, slotted, slots, policy = unpack_limit(text, 7, at + 1)
  if not uuid then return memory end
  local slot = slotted and 1 or 0
  return {node, 10, uuid, memory, cores, 1, slot, policy, slots, '', 1, slot}
end
M.demand_at = demand_at

local function demand_of(header, value)
  return demand_at(value, BYTES + GRANT_BYTES * header[L.SHARE_COUNT] + header[L.DESCRIPTION_BYTES])
end
M.demand_of = demand_of

local function resources_in(text)
  local resources = parsed_resources[text] or parse_json(text)
  parsed_resources[text] = resources
  return resources
end
M.resources_in = resources_in

-- Raises an error for what is no lease.
function M.check(value)
  local header = header_of(value)
  local at = BYTES + GRANT_BYTES * header[L.SHARE_COUNT]
  if not MAY_BECOME[header[L.STATE]] or at + header[L.DESCRIPTION_BYTES] >= #value then error('') end
  local _, groups_text, resources, pod, gang, namespace = unpack_limit(value, 5, at + 1)
  local demand = demand_of(header, value)
  local texts = table.concat({groups_text, resources, pod, gang, namespace, demand[1]})
  if type(resources_in(resources)) ~= 'table' then error(texts) end
  for d = FIRST_DEVICE, demand[2], DEVICE_FIELDS do
    if type(demand[d]) ~= 'string' or not (demand[d + 1] >= 0 and demand[d + 2] >= 0) then error('') end
  end
  if (#demand - demand[2]) / 2 ~= header[L.SHARE_COUNT] then error('') end
end

-- The lease's anti-affinity groups, resources, pod, gang and namespace.
function M.description_of(header, value)
  local _, groups_text, resources, pod, gang, namespace =
    unpack_limit(value, 5, BYTES + GRANT_BYTES * header[L.SHARE_COUNT] + 1)
  return groups_text, resources_in(resources), pod, gang, namespace
end

return M
