-- Prepended to every script of the ledger, first of the files in this folder. It loads and caches the
-- records that a script reads; `writes.lua` writes all changes at the end, so that a refused call
-- writes nothing.
--
-- All keys have one prefix and are computed: use one server, with or without replicas, not a cluster.
-- ARGV: the prefix; the arguments, a MessagePack array; the state that the ledger must be in ('ready', 'open': ready
-- or being rebuilt, 'any' or, for `eviction_policy` alone, 'check'); the length of the feed; bytes that are stored as they
-- are, joined; and the highest version that the caller has read: if this server's is lower, it has lost confirmed
-- writes, and the ledger rejects calls until it is rebuilt.
--
--   ledger  hash  format, generation, ready, version (the last one), capacity, feed_entry (ID of the last one),
--     fence_floor, node_number (the last one), rebuild_lock_until, total_cores, total_mib,
--     claims and quotas (their number; quotas: absent while they are not known),
--     records (how many the keys in RECORDS have together: a ledger with fewer has lost some), evicts (the server's policy, if it may evict keys: nothing is served then),
--     inventory_grew (capacity number at which the inventory last became better),
--     reasons_changed (the one at which the reasons of verdicts last changed: nodes, devices or cordons),
--     offered_up_to (number up to which freed capacity has been offered), offer_round (how often what was freed after
--     that was offered), offer_round_for (the highest score of `freed-nodes` then),
--     repels_version (the highest that was put into `repelling`, absent before the first), repels_floor (the highest
--     of those that the watcher has reported since)
--   nodes, devices  hashes  name, uuid -> see N_*, D_*
--   leases  hash  pod -> see L_*
--   lease-nodes  zset  pod -> number of the node that its lease is on
--   gang-leases  zset  gang|pod of every live lease of a gang, all of score 0
--   facts:NODE  hash  facts, rules, excluded_devices, devices, uuids, served, reported_at, saved_at (of the last
--     changed report, by this server), by_agent
--   node-revision:NODE  string  revisions of the node and its pods as last saved or removed, for two minutes
--   cordons  hash  node -> why no pod may be bound to it now
--   vanished  set  pods that are gone while they have leases: their containers may still run
--   silent  zset  those of them about which their nodes' agents do not reply -> instant of the first request without a reply
--   expiring  zset  {version, pods} packed -> instant at which their reservations expire
--   freed-nodes  zset  node -> capacity number at which something on it was last freed
--   waiting  hash  pod -> see W in waiting_queue.lua
--   waiting-groups  hash  group of equal smallest needs -> number of pods that wait in it
--   gang-waiting  zset  gang|order|pod of every waiting pod of a gang, all of score 0
--   changed-gangs  set  gangs whose pods' verdicts must be decided again
--   verdicts  zset  order|pod -> capacity number at which it was last decided or offered
--   offers  zset  order|pod -> instant of an offer that was not decided yet
--   unreadable  hash  (not changed by a rebuild) kind and key of a record that could not be read -> instant
--   feed  stream  absolute totals, one entry per script, with the IDs that Redis gives: p ID of the entry before,
--     e generation, v version, c capacity number, w cause, n and d changed nodes and devices, fNODE gNODE sNODE rNODE facts, devices, served resources
--     and `repelling` terms of a node, xNODE a node that was removed
--   others: see fair_share.lua, quota.lua, claims.lua, gone_pods.lua, repelling.lua,
--     tenures.lua and resize.lua
--
-- Nodes, devices and leases are many and change often. They are fields of a few hashes (one call reads or
-- writes all that a script needs) and packed with `struct` (half the time of `cmsgpack` here).
local PREFIX = ARGV[1]
local ARGS = cmsgpack.unpack(ARGV[2])
local call, encode, decode, parse_json = redis.call, cmsgpack.pack, cmsgpack.unpack, cjson.decode
local struct_pack, struct_unpack, unpack_limit = struct.pack, struct.unpack, cmsgpack.unpack_limit
local BESIDE = string.gsub(PREFIX, ':$', '') -- prefix of what a rebuild does not change

-- Texts that are joined (anti-affinity groups, resource names, gangs with pods) are escaped by the
-- callers (rows/joined_texts.py), so that no separator occurs in them. Lengths have four bytes, and
-- MOST_... limit numbers and whole records: whatever would need more is refused.

-- A device. D_STATUS: 1 takes new shares, 0 is unhealthy, 2 is excluded by an annotation of its node.
-- D_EXCLUSIVE: 1 while one share has the device to itself, plus 2 while it is claimed (claims.lua).
-- D_CLAIMED_UNTIL: second up to which leases that have ended by then may still use a claimed device; 0: none may.
-- D_MODE: 0 shares, 1 MIG instances. D_GROUPS: '' or anti-affinity groups, each between line feeds.
-- D_SLOT_MAP: used slots, or used positions of D_LAYOUT, the MIG layout that live leases pin ('': none).
-- D_HELD: '', or what its agent has given out beyond the leases, as it reports: `Held` of shared.model.device.
local DEVICE_FORMAT = '<I4I4BI4I4I4I4dBBI4I4c0I4c0I4c0I4c0I4c0I4c0'
local DEVICE_BYTES = 63
local D_MEMORY, D_SLOTS, D_STATUS, D_UNIT, D_MEMORY_USED, D_CORES_USED, D_SHARES, D_FENCE =
  1, 2, 3, 4, 5, 6, 7, 8
local D_EXCLUSIVE, D_MODE, D_CLAIMED_UNTIL, D_UUID, D_NODE, D_SLOT_MAP, D_GROUPS, D_LAYOUT, D_HELD =
  9, 10, 11, 12, 13, 14, 15, 16, 17

-- See shared.model.request.SharingPolicy.
local EXCLUSIVE, BEST_EFFORT, IDLE_DEVICE = 1, 2, 3

-- A node. N_STATUS: 1 known, 0 only its devices are known, -1 removed. N_RESOURCE_NAMES: each before a
-- line feed. From N_AMOUNTS on: the capacity and the use of each resource; of those that begin with
-- NUMA_CPUS_PREFIX, the CPUs of a NUMA node, its agent reports the capacity.
local N_RESOURCE_COUNT, N_VERSION, N_STATUS, N_NUMBER, N_NAME, N_RESOURCE_NAMES, N_AMOUNTS =
  1, 2, 3, 4, 5, 6, 7

-- A lease: these numbers; a slot (-1: none) and a fence per share; and two MessagePack arrays. The
-- first, of L_DESCRIPTION_BYTES, describes it: anti-affinity groups (each but the last before a line
-- feed), resources as JSON {name, amount, ...}, pod, gang, namespace, and what no script reads. The
-- second is its demand: see demand_at. The states are lease_states.lua's. L_EXPIRES: of a reservation, when it
-- expires; later, when the lease became active, or 0.
local LEASE_FORMAT, GRANT_FORMAT = '<BddddI4I4', 'i4d'
local LEASE_BYTES, GRANT_BYTES = 41, 12
local L_STATE, L_VERSION, L_RESERVED_VERSION, L_CREATED, L_EXPIRES, L_SHARE_COUNT, L_DESCRIPTION_BYTES =
  1, 2, 3, 4, 5, 6, 7

-- A demand, the use of a lease on a node: {node, position of the last device field, DEVICE_FIELDS
-- values per device from FIRST_DEVICE on (uuid, MiB, cores, shares, new slots, sharing policy, slots
-- that its dialect has (0: D_SLOTS), MIG layout), two values per share (number of the device, and
-- number of the slot among its new ones; 0: no slot; below 0: position -1 - value of the layout)}.
local FIRST_DEVICE, DEVICE_FIELDS, MAX_ARGS = 3, 8, 4000

local state = redis.pcall('HMGET', PREFIX .. 'ledger', 'ready', 'generation', 'version', 'capacity', 'feed_entry',
  'fence_floor', 'node_number', 'claims', 'format', 'records', 'evicts', 'repels_version')
if state.err and not string.find(state.err, '^WRONGTYPE') then return state end
if state.err then state = {} end -- a key of another type counts as empty
-- The number of the format of all that is stored under the prefix, but for `ledger`, which every version
-- must be able to read. A ledger of an older format counts as empty; a newer one is not touched.
state.format = 5
if state[2] and tonumber(state[9]) ~= state.format then
  local formats = state[9] .. ' ' .. state.format
  if tonumber(state[9]) > state.format then return redis.error_reply('FORMAT ' .. formats) end
  if ARGV[3] == 'ready' or ARGV[3] == 'open' then return redis.error_reply('NOTREADY ' .. formats) end
  state[1], state[2] = false, false
end
local is_strict = ARGV[3] == 'ready' or ARGV[3] == 'open'
if state[11] and ARGV[3] ~= 'check' then return redis.error_reply('EVICTS ' .. state[11]) end
if is_strict and (not state[2] or (ARGV[3] == 'ready' and state[1] ~= '1')) then
  return redis.error_reply('NOTREADY')
end

-- How many records there are, but for those of single nodes, namespaces and groups. A key of another type has none.
local RECORDS = {
  HLEN = {'leases', 'devices', 'nodes', 'waiting', 'waiting-groups', 'claims', 'cordons', 'unsynced', 'starts',
    'entitlements', 'node-sizes'},
  ZCARD = {'lease-nodes', 'gang-leases', 'expiring', 'freed-nodes', 'gang-waiting', 'verdicts'},
}
local count_records = function()
  local counts, sum = {redis.pcall('HLEN', BESIDE .. '-quotas'), redis.pcall('SCARD', PREFIX .. 'vanished')}, 0
  for _, key in ipairs(RECORDS.HLEN) do counts[#counts + 1] = redis.pcall('HLEN', PREFIX .. key) end
  for _, key in ipairs(RECORDS.ZCARD) do counts[#counts + 1] = redis.pcall('ZCARD', PREFIX .. key) end
  for _, count in ipairs(counts) do sum = sum + (tonumber(count) or 0) end
  return sum
end

local records = count_records()
local has_lost_records = state[1] == '1' and records < tonumber(state[10] or 0)
if has_lost_records then
  redis.pcall('HSET', PREFIX .. 'ledger', 'ready', 0) -- the caller may only have the right to read
  if is_strict then return redis.error_reply('LOSTRECORDS ' .. records .. ' ' .. state[10]) end
end
local is_ready, generation = state[1] == '1' and not has_lost_records, state[2] or ''
local last_version, capacity = tonumber(state[3] or 0), tonumber(state[4] or 0)
if is_ready and tonumber(ARGV[6]) > last_version then
  call('HSET', PREFIX .. 'ledger', 'ready', 0, 'version', ARGV[6])
  return redis.error_reply('LOSTWRITES')
end
local last_entry, fence_floor = state[5] or '0-0', tonumber(state[6] or 0)
local last_node_number, claim_count = tonumber(state[7] or 0), tonumber(state[8] or 0)
local first_version, first_capacity = last_version, capacity

local caches = {nodes = {}, devices = {}, leases = {}}
local nodes, devices, leases = caches.nodes, caches.devices, caches.leases
-- What `write_changes` writes. changed_inventories: node -> true, or false for a node that was removed.
-- inventory_changes: `grew`: pods that could never fit may fit now; `reasons`: verdicts may be outdated.
local changed_nodes, changed_devices, changed_inventories = {}, {}, {}
local freed_nodes, inventory_changes, expiring, lease_nodes = {}, {}, {}, {}
local written_leases, gang_members = {}, {}

-- A script may have 200 local names, and some have nearly as many: use locals of functions.
local node_formats = {}
local function node_format(count)
  local format = node_formats[count] or '<I4dbI4I4c0I4c0' .. string.rep('dd', count)
  node_formats[count] = format
  return format
end

local function node_value(node)
  local name, names, count = node[N_NAME], node[N_RESOURCE_NAMES], node[N_RESOURCE_COUNT]
  return struct_pack(node_format(count), count, node[N_VERSION], node[N_STATUS], node[N_NUMBER], #name,
    name, #names, names, unpack(node, N_AMOUNTS, N_AMOUNTS + 2 * count - 1))
end

local function device_value(device)
  local memory, slots, status, unit, memory_used, cores_used, shares, fence, exclusive, mode, claimed_until,
    uuid, node, slot_map, groups_text, layout, held = unpack(device, 1, D_HELD)
  return struct_pack(DEVICE_FORMAT, memory, slots, status, unit, memory_used, cores_used, shares, fence,
    exclusive, mode, claimed_until, #uuid, uuid, #node, node, #slot_map, slot_map, #groups_text, groups_text,
    #layout, layout, #held, held)
end

-- Leases stay packed until a script reads them. What is no record raises an error.
local check_lease
local readers = {
  nodes = function(value)
    local low, high = string.byte(value, 1, 2)
    local count = low + 256 * high
    if count > MOST_NODE_RESOURCES then error('') end
    local node = {struct_unpack(node_format(count), value)}
    if node[N_RESOURCE_COUNT] ~= count or node[N_AMOUNTS + 2 * count] ~= #value + 1 then error('') end
    return node
  end,
  devices = function(value)
    local device = {struct_unpack(DEVICE_FORMAT, value)}
    if device[D_HELD + 1] ~= #value + 1 then error('') end
    return device
  end,
  leases = function(value)
    check_lease(value)
    return value
  end,
}

-- Records that were fetched and cannot be read: name -> true, by kind. They count as missing, but nothing
-- may be written in their place.
local unreadable = {leases = {}, devices = {}, nodes = {}}

local function read_record(kind, name, value)
  local is_read, thing = pcall(readers[kind], value)
  if is_read then return thing end
  unreadable[kind][name] = true
  return false
end

-- Call a command with all of `names`, some at a time, and return the replies to each.
local function call_all(command, key, names)
  local replies = {}
  if #names > 0 and #names <= MAX_ARGS then return call(command, PREFIX .. key, unpack(names)) end
  for from = 1, #names, MAX_ARGS do
    local page = call(command, PREFIX .. key, unpack(names, from, math.min(from + MAX_ARGS - 1, #names)))
    for i = 1, type(page) == 'table' and #page or 0 do replies[from + i - 1] = page[i] end
  end
  return replies
end

local function fetch(kind, names)
  local cache, missing = caches[kind], {}
  for i = 1, #names do
    local name = names[i]
    if cache[name] == nil then
      cache[name] = false
      missing[#missing + 1] = name
    end
  end
  for i, value in ipairs(call_all('HMGET', kind, missing)) do
    if value then cache[missing[i]] = read_record(kind, missing[i], value) end
  end
end

local function node_of(name)
  if nodes[name] == nil then fetch('nodes', {name}) end
  return nodes[name]
end

local function device_of(uuid)
  if devices[uuid] == nil then fetch('devices', {uuid}) end
  return devices[uuid]
end

local function lease_of(pod)
  if leases[pod] == nil then fetch('leases', {pod}) end
  return leases[pod]
end

-- Fetch the leases of rows that begin with a pod, and return the pods.
local function fetch_leases_of(rows)
  local pods = {}
  for i, row in ipairs(rows) do pods[i] = row[1] end
  fetch('leases', pods)
  return pods
end

local function new_node(name)
  last_node_number = last_node_number + 1
  nodes[name] = {0, 0, 0, last_node_number, name, ''}
  return nodes[name]
end

local function new_device(uuid, node, unit, status)
  devices[uuid] = {0, 0, status, unit, 0, 0, 0, fence_floor, 0, 0, 0, uuid, node, '', '', '', ''}
  return devices[uuid]
end

-- A node and a device as arrays for a reply, without the extra value of `struct`.
local function node_row(node) return {unpack(node, 1, N_AMOUNTS + 2 * node[N_RESOURCE_COUNT] - 1)} end

local function device_row(device) return {unpack(device, 1, D_HELD)} end

local NOTHING_HELD, held_by_text = {memory_mib = 0, cores_percent = 0, shares = 0, slots = '', layout = ''}, {}
local function held_of(device)
  local text = device[D_HELD]
  if text == '' then return NOTHING_HELD end
  held_by_text[text] = held_by_text[text] or parse_json(text)
  return held_by_text[text]
end

-- What was packed, or as JSON; {} if it is missing or cannot be read.
local function readable(value, parse)
  if not value then return {} end
  local is_read, found = pcall(parse or decode, value)
  return is_read and type(found) == 'table' and found or {}
end

-- For each pair of a flat list, its two values.
local function each_pair(flat)
  local i = -1
  return function()
    i = i + 2
    return flat[i], flat[i + 1]
  end
end

-- For each field of a hash its name, and what its value packs.
local function each_packed(key)
  local found, i = call('HGETALL', key), -1
  return function()
    i = i + 2
    return found[i], readable(found[i + 1])
  end
end

local function number_at(key, field) return tonumber(call('HGET', PREFIX .. key, field) or 0) end

-- This server's clock, in milliseconds.
local function now_in_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function append(list, ...)
  for i = 1, select('#', ...) do list[#list + 1] = (select(i, ...)) end
end

local function set_of(list)
  local set = {}
  for _, name in ipairs(list) do set[name] = true end
  return set
end

local function device_uuids(name) return readable(call('HGET', PREFIX .. 'facts:' .. name, 'uuids')) end

local function pods_on_node(node)
  return call('ZRANGEBYSCORE', PREFIX .. 'lease-nodes', node[N_NUMBER], node[N_NUMBER])
end

-- The resources that a node serves, as mirrors see them; a cordoned node serves only the reason. See
-- shared.model.node.
local function served_of(name, served)
  local reason = call('HGET', PREFIX .. 'cordons', name)
  return reason and cjson.encode({CORDON_PREFIX .. reason}) or served or '[]'
end

local function next_version()
  last_version = last_version + 1
  return last_version
end

-- The highest version or fence that a caller may know from elsewhere. Both begin at the present in
-- milliseconds, by a clock that may have been wrong by decades; the ledger counts on from any of them.
local MAX_AHEAD_MS = 2 ^ 42
local function highest_number(time) return time[1] * 1000 + MAX_AHEAD_MS end

-- Save the revision of a node's state, by resource versions of the API server; false if a higher one was
-- saved less than two minutes ago. A state of revision 0 always counts: a watcher publishes all nodes so when
-- it notices that the API server was restored from a backup and begins again with lower versions.
local function raise_node_revision(name, revision, pods_revision)
  local key = PREFIX .. 'node-revision:' .. name
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
local function mark_inventory_changed(name)
  changed_nodes[name] = true
  changed_inventories[name] = true
  local uuids = device_uuids(name)
  fetch('devices', uuids)
  for _, uuid in ipairs(uuids) do changed_devices[uuid] = devices[uuid] and true or nil end
end

-- Give a device to another node. Call this only while no lease is on it.
local function move_device(device, name)
  local other, remaining = device[D_NODE], {}
  for _, uuid in ipairs(device_uuids(other)) do
    if uuid ~= device[D_UUID] then remaining[#remaining + 1] = uuid end
  end
  call('HSET', PREFIX .. 'facts:' .. other, 'uuids', encode(remaining))
  device[D_NODE], device[D_HELD] = name, ''
  changed_devices[device[D_UUID]] = true
  if node_of(other) and nodes[other][N_STATUS] == 1 then mark_inventory_changed(other) end
end

local function mark_freed(name) freed_nodes[name] = true end

-- The inventory has grown: pods that could never fit may fit now.
local function mark_grown(name) freed_nodes[name], inventory_changes.grew = true, true end

local function header_of(value) return {struct_unpack(LEASE_FORMAT, value)} end

local function put_lease(pod, value)
  leases[pod] = value
  written_leases[#written_leases + 1] = pod
  written_leases[#written_leases + 1] = value
end

local function with_header(header, value)
  return struct_pack(LEASE_FORMAT, unpack(header, 1, L_DESCRIPTION_BYTES)) .. string.sub(value, LEASE_BYTES + 1)
end

-- Write a lease whose numbers have changed, and return it.
local function put_header(pod, header, value)
  value = with_header(header, value)
  put_lease(pod, value)
  return value
end

-- Advance a lease if the table in shared/model/lease.py allows it; state and version change.
local function change_state(header, to)
  if not MAY_BECOME[header[L_STATE]][to] then
    error('a lease in state ' .. header[L_STATE] .. ' cannot become ' .. to)
  end
  if header[L_STATE] == RESERVED and to ~= EXPIRED then header[L_EXPIRES] = 0 end
  if to == ACTIVE then header[L_EXPIRES] = now_in_ms() / 1000 end
  header[L_STATE], header[L_VERSION] = to, next_version()
end

-- The slot and the fence of each share.
local function grants_of(header, value)
  return {struct_unpack('<' .. string.rep(GRANT_FORMAT, header[L_SHARE_COUNT]), value, LEASE_BYTES + 1)}
end

-- The device and the fence of a lease's first share, which no other lease has; nil without shares.
local function first_grant(demand, grants)
  local number = demand[demand[2] + 1]
  if number then return demand[FIRST_DEVICE + (number - 1) * DEVICE_FIELDS], grants[2] end
end

-- The demand that the array at `at` (from 0) describes. One share: node, uuid, MiB, cores, slotted,
-- slots, sharing policy, and what no script reads. Else: node, false, the demand.
local function demand_at(text, at)
  local _, node, uuid, memory, cores, slotted, slots, policy = unpack_limit(text, 7, at + 1)
  if not uuid then return memory end
  local slot = slotted and 1 or 0
  return {node, 10, uuid, memory, cores, 1, slot, policy, slots, '', 1, slot}
end

local function demand_of(header, value)
  return demand_at(value,
    LEASE_BYTES + GRANT_BYTES * header[L_SHARE_COUNT] + header[L_DESCRIPTION_BYTES])
end

local parsed_resources = {}
local function resources_in(text)
  local resources = parsed_resources[text] or parse_json(text)
  parsed_resources[text] = resources
  return resources
end

-- Raises an error for what is no lease.
function check_lease(value)
  local header = header_of(value)
  local at = LEASE_BYTES + GRANT_BYTES * header[L_SHARE_COUNT]
  if not MAY_BECOME[header[L_STATE]] or at + header[L_DESCRIPTION_BYTES] >= #value then error('') end
  local _, groups_text, resources, pod, gang, namespace = unpack_limit(value, 5, at + 1)
  local demand = demand_of(header, value)
  local texts = table.concat({groups_text, resources, pod, gang, namespace, demand[1]})
  if type(resources_in(resources)) ~= 'table' then error(texts) end
  for d = FIRST_DEVICE, demand[2], DEVICE_FIELDS do
    if type(demand[d]) ~= 'string' or not (demand[d + 1] >= 0 and demand[d + 2] >= 0) then error('') end
  end
  if (#demand - demand[2]) / 2 ~= header[L_SHARE_COUNT] then error('') end
end

-- The lease's anti-affinity groups, resources, pod, gang and namespace.
local function description_of(header, value)
  local _, groups_text, resources, pod, gang, namespace =
    unpack_limit(value, 5, LEASE_BYTES + GRANT_BYTES * header[L_SHARE_COUNT] + 1)
  return groups_text, resources_in(resources), pod, gang, namespace
end
