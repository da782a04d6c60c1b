-- Put before every script of the ledger: loads what is asked for, keeps it for the script's
-- duration, and writes everything at the end, so that a script that is refused writes nothing.
--
-- Keys are computed, all under one prefix: a single server or one with replicas, no cluster.
-- ARGV[1] prefix, ARGV[2] arguments (MessagePack array), ARGV[3] the state the ledger must be in
-- ('ready', 'open': ready or being rebuilt, 'any'), ARGV[4] the feed's length.
--
--   meta          hash   epoch, ready, seq (versions), capacity, feed (last entry), floor (fences)
--   node:NAME     array  version, known (1; 0: devices only; -1: gone), names of resources between
--                        line feeds, then room and used of each
--   facts:NAME    hash   facts, rules, devices, uuids, served, reported
--   device:UUID   array  see D_*
--   lease:POD     array  see L_*
--   due           zset   {version, pods} packed -> instant at which their reservations end
--   on:NAME       set    pods with a lease on the node
--   nodes         set    names of all nodes with any state
--   freed         zset   node -> capacity number at which something on it was freed last
--   waiting       hash   pod -> {group, order, verdict's capacity, record}
--   groups        hash   group of equal smallest needs -> number of pods that wait in it
--   group:GROUP   zset   order|pod, all of score 0: highest priority first, then oldest
--   verdicts      zset   order|pod -> capacity number last decided or offered at
--   offered       zset   order|pod -> instant of an offer that has had no answer
--   feed          stream absolute totals, one entry per script, numbered without gaps
local P = ARGV[1]
local A = cmsgpack.unpack(ARGV[2])
local call, pack, decode, parse = redis.call, cmsgpack.pack, cmsgpack.unpack, cjson.decode

local D_NODE, D_MEMORY, D_SLOTS, D_OK, D_UNIT = 1, 2, 3, 4, 5
local D_USED, D_CORES, D_SHARES, D_FENCE, D_TAKEN, D_TAGS = 6, 7, 8, 9, 10, 11
local N_VERSION, N_KNOWN, N_NAMES = 1, 2, 3
local L_STATE, L_VERSION, L_ORIGIN, L_NODE, L_CREATED, L_EXPIRES, L_TAG = 1, 2, 3, 4, 5, 6, 7
local L_RESOURCES, L_TAKES, L_GRANTS, L_POD, L_BODY, L_SHARES = 8, 9, 10, 11, 12, 13
-- L_RESOURCES: text of {name, amount, ...}. L_TAKES: text of {node, position of the last hold, holds
-- (from TAKES: uuid, MiB, cores, shares, slots, alone per device), places (number of the hold and
-- of the slot within it per share)}. L_GRANTS: slot and fence per share. D_TAGS: '' or tags, each
-- between line feeds. Texts are JSON: what is not looked at need not be unpacked.
local TAKES, HOLD, MAX_ARGS = 3, 6, 4000

local meta = call('HMGET', P .. 'meta', 'ready', 'epoch', 'seq', 'capacity', 'feed', 'floor')
if ARGV[3] ~= 'any' and (not meta[2] or (ARGV[3] == 'ready' and meta[1] ~= '1')) then
  return redis.error_reply('NOTREADY')
end
local epoch = meta[2] or ''
local seq, capacity = tonumber(meta[3] or 0), tonumber(meta[4] or 0)
local feed, floor = tonumber(meta[5] or 0), tonumber(meta[6] or 0)
local first_seq, first_capacity = seq, capacity

local caches = {node = {}, device = {}, lease = {}}
local nodes, devices, leases = caches.node, caches.device, caches.lease
local changed_nodes, changed_devices, changed_leases, inventories = {}, {}, {}, {}
local freed, due, joins, writes = {}, {}, {}, {}

local function fetch(kind, names)
  local cache, keys, asked = caches[kind], {}, {}
  for _, name in ipairs(names) do
    if cache[name] == nil then
      cache[name] = false
      asked[#asked + 1] = name
      keys[#keys + 1] = P .. kind .. ':' .. name
    end
  end
  for from = 1, #keys, MAX_ARGS do
    local to = math.min(from + MAX_ARGS - 1, #keys)
    local found = call('MGET', unpack(keys, from, to))
    for i = from, to do
      local value = found[i - from + 1]
      if value then cache[asked[i]] = decode(value) end
    end
  end
end

local function node_of(name)
  if nodes[name] == nil then fetch('node', {name}) end
  return nodes[name]
end

local function device_of(uuid)
  if devices[uuid] == nil then fetch('device', {uuid}) end
  return devices[uuid]
end

local function lease_of(pod)
  if leases[pod] == nil then fetch('lease', {pod}) end
  return leases[pod]
end

local function uuids_on(name)
  local packed = call('HGET', P .. 'facts:' .. name, 'uuids')
  return packed and decode(packed) or {}
end

local function touch_node(name)
  changed_nodes[name] = true
end

local function next_version()
  seq = seq + 1
  return seq
end

local function free_on(name)
  freed[name] = true
end

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

local function has_tag(device, tag)
  return string.find(device[D_TAGS], '\n' .. tag .. '\n', 1, true)
end

local function with_tag(device, tag, sign)
  local tags = device[D_TAGS]
  if sign > 0 then return (tags == '' and '\n' or tags) .. tag .. '\n' end
  local from, to = has_tag(device, tag)
  if not from then return tags end
  local left = string.sub(tags, 1, from) .. string.sub(tags, to + 1)
  return left == '\n' and '' or left
end

-- Where the room of each of a node's resources is; what is used of it is behind it.
local schemas = {}
local function schema_of(node)
  local names = node[N_NAMES]
  local schema = schemas[names]
  if not schema then
    schema = {}
    local at = N_NAMES + 1
    for name in string.gmatch(names, '[^\n]+') do
      schema[name] = at
      at = at + 2
    end
    schemas[names] = schema
  end
  return schema
end

local function add_resource(node, name, room, used)
  local at = #node + 1
  node[at], node[at + 1] = room, used
  node[N_NAMES] = node[N_NAMES] .. name .. '\n'
  return at
end

-- Count in the node's and its devices' totals (sign 1) or take out again (sign -1).
local function count(takes, resources, tag, sign)
  local name = takes[1]
  local node = nodes[name]
  local schema = schema_of(node)
  for i = 1, #resources, 2 do
    local at = schema[resources[i]]
    if not at then
      at = add_resource(node, resources[i], 0, 0)
      schema = schema_of(node)
    end
    node[at + 1] = node[at + 1] + sign * resources[i + 1]
  end
  changed_nodes[name] = true
  for h = TAKES, takes[2], HOLD do
    local uuid = takes[h]
    local device = devices[uuid]
    device[D_USED] = device[D_USED] + sign * takes[h + 1]
    device[D_CORES] = device[D_CORES] + sign * takes[h + 2]
    device[D_SHARES] = device[D_SHARES] + sign * takes[h + 3]
    if tag ~= '' then device[D_TAGS] = with_tag(device, tag, sign) end
    changed_devices[uuid] = true
  end
end

-- Why a device cannot take a hold, or nil. The order is that of shared.model.device.refusal_of.
local function device_refusal(device, node_name, holds, h, tag)
  if not device then return 'device-unknown' end
  if device[D_NODE] ~= node_name then return 'device-moved' end
  if device[D_OK] ~= 1 then return 'device-unhealthy' end
  if holds[h + 4] > 0 and device[D_SHARES] + holds[h + 3] > device[D_SLOTS] then return 'slots' end
  if tag ~= '' and has_tag(device, tag) then return 'tag' end
  if device[D_USED] + holds[h + 1] > device[D_MEMORY] then return 'memory' end
  if device[D_CORES] + holds[h + 2] > 100 then return 'cores' end
  if holds[h + 5] == 1 and device[D_SHARES] > 0 then return 'alone' end
  if device[D_CORES] >= 100 then return 'held-alone' end
end

local function fits(takes, resources, tag)
  local name = takes[1]
  local node = node_of(name)
  if not node or node[N_KNOWN] ~= 1 then return 'node-unknown' end
  local schema = schema_of(node)
  for i = 1, #resources, 2 do
    local amount = resources[i + 1]
    if amount > 0 then
      local at = schema[resources[i]]
      if not at or node[at + 1] + amount > node[at] then return 'resource:' .. resources[i] end
    end
  end
  for h = TAKES, takes[2], HOLD do
    local why = device_refusal(device_of(takes[h]), name, takes, h, tag)
    if why then return why .. ' of ' .. takes[h] end
  end
end

-- Note a new lease in the indexes.
local function index_lease(pod, node, expires_at)
  changed_leases[pod] = true
  if expires_at > 0 then
    local pods = due[expires_at]
    if not pods then
      pods = {}
      due[expires_at] = pods
    end
    pods[#pods + 1] = pod
  end
  local on = joins[node]
  if not on then
    on = {}
    joins[node] = on
  end
  on[#on + 1] = pod
end

local function leave_waiting(pods)
  if #pods == 0 or call('EXISTS', P .. 'waiting') == 0 then return end
  local found = call('HMGET', P .. 'waiting', unpack(pods))
  for i, pod in ipairs(pods) do
    if found[i] then
      local record = decode(found[i])
      local member = record[2] .. '|' .. pod
      call('HDEL', P .. 'waiting', pod)
      call('ZREM', P .. 'group:' .. record[1], member)
      call('ZREM', P .. 'verdicts', member)
      call('ZREM', P .. 'offered', member)
      if call('HINCRBY', P .. 'groups', record[1], -1) <= 0 then
        call('HDEL', P .. 'groups', record[1])
      end
    end
  end
end

local needs, uuids_here = {}, {}

local function need_of(group)
  if not needs[group] then
    local need = {}
    for part in string.gmatch(group, '%d+') do need[#need + 1] = tonumber(part) end
    needs[group] = need
  end
  return unpack(needs[group])
end

-- Could a pod of the group fit on the node, by its smallest need alone? Says how often.
local function room_for(group, name)
  local gpus, units, percent, cores, alone, slotted = need_of(group)
  if gpus == 0 then return 1 end
  if not uuids_here[name] then
    uuids_here[name] = uuids_on(name)
    fetch('device', uuids_here[name])
  end
  local times, fitting = 0, 0
  for _, uuid in ipairs(uuids_here[name]) do
    local device = devices[uuid]
    if device and device[D_OK] == 1 and device[D_NODE] == name and device[D_CORES] < 100
      and not (alone == 1 and device[D_SHARES] > 0) then
      local unit, need = device[D_UNIT], device[D_MEMORY]
      if percent > 0 then
        need = math.floor(math.floor(device[D_MEMORY] / unit) * percent / 100) * unit
      elseif units > 0 then
        need = units * unit
      end
      local n = need > 0 and math.floor((device[D_MEMORY] - device[D_USED]) / need) or 64
      if cores > 0 then n = math.min(n, math.floor((100 - device[D_CORES]) / cores)) end
      if slotted == 1 then n = math.min(n, device[D_SLOTS] - device[D_SHARES]) end
      if n > 0 then
        fitting = fitting + 1
        times = times + n
      end
    end
  end
  if fitting < gpus then return 0 end
  return math.max(1, math.floor(times / gpus))
end

-- Forget the touched nodes that are gone and hold nothing. Fences go on from the highest forgotten.
local function drop_gone()
  for name in pairs(changed_nodes) do
    local node = nodes[name]
    if node and node[N_KNOWN] == -1 and call('SCARD', P .. 'on:' .. name) == 0 then
      local uuids = uuids_on(name)
      fetch('device', uuids)
      for _, uuid in ipairs(uuids) do
        local device = devices[uuid]
        if device and device[D_NODE] == name then
          floor = math.max(floor, device[D_FENCE])
          devices[uuid] = false
          call('DEL', P .. 'device:' .. uuid)
        end
      end
      nodes[name], freed[name] = false, nil
      call('DEL', P .. 'node:' .. name, P .. 'facts:' .. name)
      call('SREM', P .. 'nodes', name)
      call('ZREM', P .. 'freed', name)
    end
  end
end

local function write_pairs()
  for from = 1, #writes, MAX_ARGS do
    call('MSET', unpack(writes, from, math.min(from + MAX_ARGS - 1, #writes)))
  end
end

local function append_feed(cause, version)
  local entry = {'e', epoch, 'c', capacity, 'w', cause}
  local function add(key, value)
    entry[#entry + 1] = key
    entry[#entry + 1] = value
  end
  for name in pairs(changed_nodes) do
    local node = nodes[name]
    if node then
      node[N_VERSION] = version
      local packed = pack(node)
      writes[#writes + 1] = P .. 'node:' .. name
      writes[#writes + 1] = packed
      add('n' .. name, packed)
    end
  end
  for uuid in pairs(changed_devices) do
    local device = devices[uuid]
    if device then
      local packed = pack(device)
      writes[#writes + 1] = P .. 'device:' .. uuid
      writes[#writes + 1] = packed
      add('d' .. uuid, packed)
    end
  end
  for name, told in pairs(inventories) do
    if told then
      local facts = call('HMGET', P .. 'facts:' .. name, 'facts', 'devices', 'served')
      add('f' .. name, facts[1] or '')
      add('g' .. name, facts[2] or '[]')
      add('s' .. name, facts[3] or '[]')
    else
      add('x' .. name, '')
    end
  end
  if #entry > 6 then
    feed = feed + 1
    call('XADD', P .. 'feed', 'MAXLEN', '~', ARGV[4], string.format('%.0f-0', feed), unpack(entry))
  end
end

-- Write everything. `cause` says in the feed what happened.
local function flush(cause)
  if next(freed) then capacity = capacity + 1 end
  append_feed(cause, next_version())
  for pod in pairs(changed_leases) do
    writes[#writes + 1] = P .. 'lease:' .. pod
    writes[#writes + 1] = pack(leases[pod])
  end
  write_pairs()
  for at, pods in pairs(due) do call('ZADD', P .. 'due', at, pack({seq, pods})) end
  for name, pods in pairs(joins) do call('SADD', P .. 'on:' .. name, unpack(pods)) end
  for name in pairs(freed) do call('ZADD', P .. 'freed', capacity, name) end
  if seq ~= first_seq or capacity ~= first_capacity then
    call('HSET', P .. 'meta', 'seq', seq, 'capacity', capacity, 'feed', feed,
      'floor', floor)
  end
end
