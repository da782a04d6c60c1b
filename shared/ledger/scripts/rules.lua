-- What fits where, and what a lease changes in totals and indexes.

-- Slots: a string of 0 and 1, one character per slot number, cut off after the last one used.

local function lowest_slot(taken)
  local at = string.find(taken, '0', 1, true)
  return at and at - 1 or #taken
end

local function with_slot(taken, slot, mark)
  if slot == #taken then return taken .. mark end
  if slot >= #taken then taken = taken .. string.rep('0', slot + 1 - #taken) end
  return string.sub(taken, 1, slot) .. mark .. string.sub(taken, slot + 2)
end

local function found_tag(tags, tag)
  return string.find(tags, '\n' .. tag .. '\n', 1, true)
end

local function has_tag(device, tags)
  if tags == '' or device[D_TAGS] == '' then return false end
  for tag in string.gmatch(tags, '[^\n]+') do
    if found_tag(device[D_TAGS], tag) then return true end
  end
  return false
end

local function with_tags(known, tags, sign)
  for tag in string.gmatch(tags, '[^\n]+') do
    if sign > 0 then
      known = (known == '' and '\n' or known) .. tag .. '\n'
    else
      local from, to = found_tag(known, tag)
      if from then known = string.sub(known, 1, from) .. string.sub(known, to + 1) end
      if known == '\n' then known = '' end
    end
  end
  return known
end

-- Where the room of each of a node's resources is; what is used of it is behind it.
local schemas = {}
local function schema_of(node)
  local names = node[N_NAMES]
  local schema = schemas[names]
  if not schema then
    schema = {}
    local at = N_AMOUNTS
    for name in string.gmatch(names, '[^\n]+') do
      schema[name] = at
      at = at + 2
    end
    schemas[names] = schema
  end
  return schema
end

local function add_resource(node, name, room, used)
  local at = N_AMOUNTS + 2 * node[N_COUNT]
  node[at], node[at + 1] = room, used
  node[N_COUNT] = node[N_COUNT] + 1
  node[N_NAMES] = node[N_NAMES] .. name .. '\n'
  return at
end

-- Positions of the room for `resources` (0: there is none), each before its amount.
local positions = {}
local function places_of(resources, node)
  local known, names = positions[resources], node[N_NAMES]
  if not known then
    known = {}
    positions[resources] = known
  end
  local places = known[names]
  if not places then
    local schema = schema_of(node)
    places = {}
    for i = 1, #resources, 2 do
      places[i], places[i + 1] = schema[resources[i]] or 0, resources[i + 1]
    end
    known[names] = places
  end
  return places
end

local function count_on_node(node, resources, sign)
  local places = places_of(resources, node)
  for i = 1, #places, 2 do
    local at = places[i]
    if at == 0 then at = add_resource(node, resources[i], 0, 0) end
    node[at + 1] = node[at + 1] + sign * places[i + 1]
  end
  changed_nodes[node[N_NAME]] = true
end

local function count_on_device(device, memory, cores, shares, company, layout, tags, sign)
  device[D_USED] = device[D_USED] + sign * memory
  device[D_CORES] = device[D_CORES] + sign * cores
  device[D_SHARES] = device[D_SHARES] + sign * shares
  if company == ALONE then
    local alone = device[D_ALONE]
    device[D_ALONE] = alone - alone % 2 + (sign > 0 and 1 or 0)
  end
  if layout ~= '' then
    if sign > 0 then
      device[D_LAYOUT] = layout
    elseif device[D_SHARES] == 0 then
      device[D_LAYOUT] = ''
    end
  end
  if tags ~= '' then device[D_TAGS] = with_tags(device[D_TAGS], tags, sign) end
  changed_devices[device[D_UUID]] = true
end

-- Count in the node's and its devices' totals (sign 1) or take out again (sign -1).
local function count(takes, resources, tags, sign)
  count_on_node(nodes[takes[1]], resources, sign)
  for h = TAKES, takes[2], HOLD do
    count_on_device(devices[takes[h]], takes[h + 1], takes[h + 2], takes[h + 3], takes[h + 5],
      takes[h + 7], tags, sign)
  end
end

local function node_refusal(node, resources)
  if not node or node[N_KNOWN] ~= 1 then return 'node-unknown' end
  local places = places_of(resources, node)
  for i = 1, #places, 2 do
    local at, amount = places[i], places[i + 1]
    if amount > 0 and (at == 0 or node[at + 1] + amount > node[at]) then
      return 'resource:' .. resources[i]
    end
  end
end

-- Why a device cannot take a hold, or nil. The order is that of shared.model.device.device_refusal.
local function device_refusal(device, node_name, memory, cores, shares, slotted, company, slots,
    layout, tags)
  if not device then return 'device-unknown' end
  if device[D_NODE] ~= node_name then return 'device-moved' end
  if device[D_OK] ~= 1 then
    return device[D_OK] == 2 and 'device-closed' or 'device-unhealthy'
  end
  if (device[D_MODE] == 1) ~= (layout ~= '') then return 'mode' end
  if slotted and device[D_SHARES] + shares > (slots > 0 and slots or device[D_SLOTS]) then
    return 'slots'
  end
  if tags ~= '' and has_tag(device, tags) then return 'tag' end
  if device[D_USED] + memory > device[D_MEMORY] then return 'memory' end
  if device[D_CORES] + cores > 100 then return 'cores' end
  if (company == ALONE or company == IDLE) and device[D_SHARES] > 0 then return 'alone' end
  if device[D_ALONE] > 0 then return 'held-alone' end
  if device[D_CORES] >= 100 and company ~= ANY then return 'held-alone' end
  if device[D_LAYOUT] ~= layout and device[D_SHARES] > 0 then return 'layout' end
end

local function is_taken(device, slot)
  return string.sub(device[D_TAKEN], slot + 1, slot + 1) == '1'
end

local function refusal(takes, resources, tags)
  local name, last = takes[1], takes[2]
  local why = node_refusal(node_of(name), resources)
  if why then return why end
  for h = TAKES, last, HOLD do
    why = device_refusal(device_of(takes[h]), name, takes[h + 1], takes[h + 2], takes[h + 3],
      takes[h + 4] > 0, takes[h + 5], takes[h + 6], takes[h + 7], tags)
    if why then return why .. ' of ' .. takes[h] end
  end
  for p = last + 1, #takes, 2 do
    local uuid, position = takes[TAKES + (takes[p] - 1) * HOLD], -1 - takes[p + 1]
    if position >= 0 and is_taken(devices[uuid], position) then
      return 'position ' .. position .. ' of ' .. uuid
    end
  end
end

-- Note a new lease in the indexes.
local function index_lease(pod, node, expires_at, gang)
  if gang ~= '' then
    joining[#joining + 1] = 0
    joining[#joining + 1] = gang .. '|' .. pod
  end
  on[#on + 1] = node[N_NUMBER]
  on[#on + 1] = pod
  if expires_at > 0 then
    local pods = due[expires_at]
    if not pods then
      pods = {}
      due[expires_at] = pods
    end
    pods[#pods + 1] = pod
  end
end
