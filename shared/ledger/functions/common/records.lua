-- Nodes, devices and leases as one call reads and changes them; `writes.lua` writes the changes at its end.
--
-- Texts that are joined (anti-affinity groups, resource names, gangs with pods) are escaped by the
-- callers (rows/joined_texts.py), so that no separator occurs in them. MOST_... limit numbers and whole
-- records: whatever would need more is refused.
local constants = require('constants')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local server = require('server')
local values = require('values')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode

-- Records are those of `shared/ledger/records.py`. RESOURCES of a node: of those that begin with NUMA_CPUS_PREFIX, the
-- CPUs of a NUMA node, its agent reports the capacity.
local D, N = layouts.DEVICE, layouts.NODE

local M = {}
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

-- Each returns nil for what is no record of the layout; `lease.read` knows its own.
local readers = {leases = lease.read, devices = values.record, nodes = values.record_with_list}
local record_layouts = {devices = D, nodes = N}

-- Whether a value is the record of a lease, device or node.
function M.is_readable(kind, value) return readers[kind](value, record_layouts[kind]) ~= nil end

-- Delete a record that cannot be read.
function M.forget(kind, name)
  call('HDEL', server.prefix .. kind, name)
  caches[kind][name], M.unreadable[kind][name] = false, nil
end

function M.fetch(kind, names)
  local cache, read, layout, missing, count = caches[kind], readers[kind], record_layouts[kind], {}, 0
  for i = 1, #names do
    local name = names[i]
    if cache[name] == nil then
      cache[name] = false
      count = count + 1
      missing[count] = name
    end
  end
  local stored = server.call_all('HMGET', kind, missing)
  for i = 1, count do
    local value = stored[i]
    local record = value and read(value, layout)
    if record then
      cache[missing[i]] = record
    elseif value then
      M.unreadable[kind][missing[i]] = true
    end
  end
end

function M.node_of(name)
  local node = M.nodes[name]
  if node ~= nil then return node end
  M.fetch('nodes', {name})
  return M.nodes[name]
end

function M.device_of(uuid)
  local device = M.devices[uuid]
  if device ~= nil then return device end
  M.fetch('devices', {uuid})
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
  M.nodes[name] = M.empty_node(name, ledger.node_number, 0)
  return M.nodes[name]
end

function M.empty_node(name, number, status) return {0, status, number, name, '', {}} end

function M.new_device(uuid, node, unit, status)
  M.devices[uuid] = {
    0, 0, status, unit, 0, 0, 0, ledger.fence_floor, false, false, 0, false, uuid, node, '', '', '', '', '',
  }
  return M.devices[uuid]
end

-- Forget what leases and claims use of a device.
function M.clear_use(device)
  device[D.USED_MIB], device[D.USED_CORES], device[D.SHARES] = 0, 0, 0
  device[D.EXCLUSIVE], device[D.IS_CLAIMED], device[D.CLAIMED_UNTIL] = false, false, 0
  device[D.SLOT_MAP], device[D.GROUPS], device[D.LAYOUT], device[D.MODE] = '', '', '', ''
  M.changed_devices[device[D.UUID]] = true
end

local NOTHING_HELD = {memory_mib = 0, cores_percent = 0, shares = 0, slots = '', layout = '', mode = ''}
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

function M.put_lease(pod, of_pod)
  M.leases[pod] = of_pod
  local parts = M.written_leases
  local last = #parts
  parts[last + 1], parts[last + 2] = pod, of_pod.value
end

return M
