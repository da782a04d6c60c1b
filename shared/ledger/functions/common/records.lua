-- Nodes, devices and leases as one call reads and changes them; `writes.lua` writes the changes at its end.
--
-- Texts that are joined (anti-affinity groups, resource names, gangs with pods) are escaped by the
-- callers (rows/joined_texts.py), so that no separator occurs in them. Lengths have four bytes, and
-- MOST_... limit numbers and whole records: whatever would need more is refused.
local constants = require('constants')
local lease = require('lease')
local ledger = require('ledger')
local server = require('server')
local values = require('values')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode
local struct_pack, struct_unpack = struct.pack, struct.unpack

-- A device. STATUS: 1 takes new shares, 0 is unhealthy, 2 is excluded by an annotation of its node.
-- EXCLUSIVE: 1 while one share has the device to itself, plus 2 while it is claimed (claims.lua).
-- CLAIMED_UNTIL: second up to which leases that have ended by then may still use a claimed device; 0: none may.
-- MODE: 0 shares, 1 MIG instances. GROUPS: '' or anti-affinity groups, each between line feeds.
-- SLOT_MAP: used slots, or used positions of LAYOUT, the MIG layout that live leases pin ('': none).
-- HELD: '', or what its agent has given out beyond the leases, as it reports: `Held` of shared.model.devices.device.
local DEVICE_FORMAT = '<I4I4BI4I4I4I4dBBI4I4c0I4c0I4c0I4c0I4c0I4c0'
local D = {
  MEMORY = 1, SLOTS = 2, STATUS = 3, UNIT = 4, MEMORY_USED = 5, CORES_USED = 6, SHARES = 7, FENCE = 8, EXCLUSIVE = 9,
  MODE = 10, CLAIMED_UNTIL = 11, UUID = 12, NODE = 13, SLOT_MAP = 14, GROUPS = 15, LAYOUT = 16, HELD = 17,
}

-- A node. STATUS: 1 known, 0 only its devices are known, -1 removed. RESOURCE_NAMES: each before a
-- line feed. From AMOUNTS on: the capacity and the use of each resource; of those that begin with
-- NUMA_CPUS_PREFIX, the CPUs of a NUMA node, its agent reports the capacity.
local N = {RESOURCE_COUNT = 1, VERSION = 2, STATUS = 3, NUMBER = 4, NAME = 5, RESOURCE_NAMES = 6, AMOUNTS = 7}

local M = {D = D, N = N}
local caches, held_by_text
server.on_begin(function()
  M.nodes, M.devices, M.leases = {}, {}, {}
  caches = {nodes = M.nodes, devices = M.devices, leases = M.leases}
  -- Records that were fetched and cannot be read: name -> true, by kind. They count as missing, but nothing
  -- may be written in their place.
  M.unreadable = {leases = {}, devices = {}, nodes = {}}
  -- What `write_changes` writes. changed_inventories: node -> true, or false for a node that was removed.
  -- inventory_changes: `grew`: pods that could never fit may fit now; `reasons`: verdicts may be outdated.
  M.changed_nodes, M.changed_devices, M.changed_inventories = {}, {}, {}
  M.freed_nodes, M.inventory_changes = {}, {}
  M.expiring, M.lease_nodes, M.written_leases, M.gang_members = {}, {}, {}, {}
  held_by_text = {}
end)

local node_formats = {} -- by the number of resources, for all calls
local function node_format(count)
  local format = node_formats[count] or '<I4dbI4I4c0I4c0' .. string.rep('dd', count)
  node_formats[count] = format
  return format
end

function M.node_value(node)
  local name, names, count = node[N.NAME], node[N.RESOURCE_NAMES], node[N.RESOURCE_COUNT]
  return struct_pack(node_format(count), count, node[N.VERSION], node[N.STATUS], node[N.NUMBER], #name,
    name, #names, names, unpack(node, N.AMOUNTS, N.AMOUNTS + 2 * count - 1))
end

function M.device_value(device)
  local memory, slots, status, unit, memory_used, cores_used, shares, fence, exclusive, mode, claimed_until,
    uuid, node, slot_map, groups_text, layout, held = unpack(device, 1, D.HELD)
  return struct_pack(DEVICE_FORMAT, memory, slots, status, unit, memory_used, cores_used, shares, fence,
    exclusive, mode, claimed_until, #uuid, uuid, #node, node, #slot_map, slot_map, #groups_text, groups_text,
    #layout, layout, #held, held)
end

-- Leases stay packed until a function reads them. What is no record raises an error.
local readers = {}

function readers.nodes(value)
  local low, high = string.byte(value, 1, 2)
  local count = low + 256 * high
  if count > constants.MOST_NODE_RESOURCES then error('') end
  local node = {struct_unpack(node_format(count), value)}
  if node[N.RESOURCE_COUNT] ~= count or node[N.AMOUNTS + 2 * count] ~= #value + 1 then error('') end
  return node
end

function readers.devices(value)
  local device = {struct_unpack(DEVICE_FORMAT, value)}
  if device[D.HELD + 1] ~= #value + 1 then error('') end
  return device
end

function readers.leases(value)
  lease.check(value)
  return value
end

function M.read_record(kind, name, value)
  local is_read, thing = pcall(readers[kind], value)
  if is_read then return thing end
  M.unreadable[kind][name] = true
  return false
end

function M.fetch(kind, names)
  local cache, missing = caches[kind], {}
  for i = 1, #names do
    local name = names[i]
    if cache[name] == nil then
      cache[name] = false
      missing[#missing + 1] = name
    end
  end
  for i, value in ipairs(server.call_all('HMGET', kind, missing)) do
    if value then cache[missing[i]] = M.read_record(kind, missing[i], value) end
  end
end

function M.node_of(name)
  if M.nodes[name] == nil then M.fetch('nodes', {name}) end
  return M.nodes[name]
end

function M.device_of(uuid)
  if M.devices[uuid] == nil then M.fetch('devices', {uuid}) end
  return M.devices[uuid]
end

function M.lease_of(pod)
  if M.leases[pod] == nil then M.fetch('leases', {pod}) end
  return M.leases[pod]
end

-- Fetch the leases of rows that begin with a pod, and return the pods.
function M.fetch_leases_of(rows)
  local pods = {}
  for i, row in ipairs(rows) do pods[i] = row[1] end
  M.fetch('leases', pods)
  return pods
end

function M.new_node(name)
  ledger.node_number = ledger.node_number + 1
  M.nodes[name] = {0, 0, 0, ledger.node_number, name, ''}
  return M.nodes[name]
end

function M.new_device(uuid, node, unit, status)
  M.devices[uuid] = {0, 0, status, unit, 0, 0, 0, ledger.fence_floor, 0, 0, 0, uuid, node, '', '', '', ''}
  return M.devices[uuid]
end

-- A node and a device as arrays for a reply, without the extra value of `struct`.
function M.node_row(node) return {unpack(node, 1, N.AMOUNTS + 2 * node[N.RESOURCE_COUNT] - 1)} end

function M.device_row(device) return {unpack(device, 1, D.HELD)} end

local NOTHING_HELD = {memory_mib = 0, cores_percent = 0, shares = 0, slots = '', layout = ''}
function M.held_of(device)
  local text = device[D.HELD]
  if text == '' then return NOTHING_HELD end
  held_by_text[text] = held_by_text[text] or parse_json(text)
  return held_by_text[text]
end

function M.device_uuids(name) return values.readable(call('HGET', server.prefix .. 'facts:' .. name, 'uuids')) end

function M.pods_on_node(node)
  return call('ZRANGEBYSCORE', server.prefix .. 'lease-nodes', node[N.NUMBER], node[N.NUMBER])
end

-- The resources that a node serves, as mirrors see them; a cordoned node serves only the reason. See
-- shared.model.devices.node.
function M.served_of(name, served)
  local reason = call('HGET', server.prefix .. 'cordons', name)
  return reason and cjson.encode({constants.CORDON_PREFIX .. reason}) or served or '[]'
end

-- Save the revision of a node's state, by resource versions of the API server; false if a higher one was
-- saved less than two minutes ago. A state of revision 0 always counts: a watcher publishes all nodes so when
-- it notices that the API server was restored from a backup and begins again with lower versions.
function M.raise_node_revision(name, revision, pods_revision)
  local key = server.prefix .. 'node-revision:' .. name
  local stored = redis.pcall('GET', key)
  if type(stored) == 'string' and revision > 0 then
    local known, known_pods = string.match(stored, '^(%d+) (%d+)$')
    known, known_pods = tonumber(known or 0), tonumber(known_pods or 0)
    if revision < known or (revision == known and pods_revision < known_pods) then return false end
  end
  call('SET', key, string.format('%.0f %.0f', revision, pods_revision), 'EX', 120)
  return true
end

-- Mark the node, and its devices for the mirrors.
function M.mark_inventory_changed(name)
  M.changed_nodes[name] = true
  M.changed_inventories[name] = true
  local uuids = M.device_uuids(name)
  M.fetch('devices', uuids)
  for _, uuid in ipairs(uuids) do M.changed_devices[uuid] = M.devices[uuid] and true or nil end
end

-- Give a device to another node. Call this only while no lease is on it.
function M.move_device(device, name)
  local other, remaining = device[D.NODE], {}
  for _, uuid in ipairs(M.device_uuids(other)) do
    if uuid ~= device[D.UUID] then remaining[#remaining + 1] = uuid end
  end
  call('HSET', server.prefix .. 'facts:' .. other, 'uuids', encode(remaining))
  device[D.NODE], device[D.HELD] = name, ''
  M.changed_devices[device[D.UUID]] = true
  if M.node_of(other) and M.nodes[other][N.STATUS] == 1 then M.mark_inventory_changed(other) end
end

function M.mark_freed(name) M.freed_nodes[name] = true end

-- The inventory has grown: pods that could never fit may fit now.
function M.mark_grown(name) M.freed_nodes[name], M.inventory_changes.grew = true, true end

function M.put_lease(pod, value)
  M.leases[pod] = value
  M.written_leases[#M.written_leases + 1] = pod
  M.written_leases[#M.written_leases + 1] = value
end

-- Write a lease whose numbers have changed, and return it.
function M.put_header(pod, header, value)
  value = lease.with_header(header, value)
  M.put_lease(pod, value)
  return value
end

return M
