-- Put before every script of the ledger, with rules.lua, queue.lua and writing.lua: loads what is
-- asked for, keeps it for the script's duration, and writes everything at the end, so that a script
-- that is refused writes nothing.
--
-- Keys are computed, all under one prefix: a single server or one with replicas, no cluster.
-- ARGV[1] prefix, ARGV[2] arguments (MessagePack array), ARGV[3] the state the ledger must be in
-- ('ready', 'open': ready or being rebuilt, 'any'), ARGV[4] the feed's length, ARGV[5] what is
-- stored as it comes (joined), ARGV[6] the highest version that the caller has heard of: where this
-- server has none so high, it has lost what it once answered, and the ledger is closed.
--
--   ledger        hash   format, epoch, ready, seq (versions), capacity, feed (last entry), floor (fences),
--                        numbered (nodes), grown (capacity number at which the inventory last became
--                        better), offered (number up to which what was freed has been offered), round
--                        (how often what was freed after that was offered), round_for (the highest of
--                        `freed` then), claims (how many)
--   meta          string for programs that knew no format and kept a hash there: all they ask fails
--   nodes         hash   name -> see N_*
--   devices       hash   uuid -> see D_*
--   leases        hash   pod -> see L_*
--   on            zset   pod -> number of the node that it has a lease on
--   ganged        zset   gang|pod of every live lease of a gang, all of score 0
--   facts:NAME    hash   facts, rules, seen, closed, devices, uuids, served, reported, agent
--   shut          hash   node -> why no pod may be bound to it now, though it serves resources
--   due           zset   {version, pods} packed -> instant at which their reservations end
--   freed         zset   node -> capacity number at which something on it was freed last
--   waiting       hash   pod -> {group (see QUIET), order, verdict's capacity, since, record,
--                        gang, group, namespace}
--   groups        hash   group of equal smallest needs -> number of pods that wait in it
--   queue:..., line:..., taken-..., see fair.lua
--   mustering     zset   gang|order|pod of every waiting pod of a gang, all of score 0
--   verdicts      zset   order|pod -> capacity number last decided or offered at
--   offered       zset   order|pod -> instant of an offer that has had no answer
--   quotas, charges, held, ...   see limits.lua
--   feed          stream absolute totals, one entry per script, numbered without gaps
--
-- Nodes, devices and leases are many and change often, so that every microsecond on one of them
-- counts: they are fields of few hashes (one call reads or writes all that a script needs, and no
-- key has to be put together) and packed with `struct` (half the time of `cmsgpack` here).
local P = ARGV[1]
local A = cmsgpack.unpack(ARGV[2])
local call, pack, decode, parse = redis.call, cmsgpack.pack, cmsgpack.unpack, cjson.decode
local packed, unpacked, pieces = struct.pack, struct.unpack, cmsgpack.unpack_limit

-- A device. D_OK: 1 takes new shares, 0 unhealthy, 2 closed by the node's annotations. D_ALONE: 1
-- while a share keeps it to itself, plus 2 while it is claimed (claiming.lua). D_MODE: 0 shares, 1 MIG instances. D_TAGS: '' or tags, each between
-- line feeds. D_TAKEN: slots, or positions of D_LAYOUT, the MIG layout that live leases pin ('': none).
local DEVICE = '<I4I4BI4I4I4I4dBBBc0Bc0Hc0Hc0Bc0'
local D_MEMORY, D_SLOTS, D_OK, D_UNIT, D_USED, D_CORES, D_SHARES, D_FENCE = 1, 2, 3, 4, 5, 6, 7, 8
local D_ALONE, D_MODE, D_UUID, D_NODE, D_TAKEN, D_TAGS, D_LAYOUT = 9, 10, 11, 12, 13, 14, 15

-- How a share takes to others: shared.model.request.Company.
local ALONE, ANY, IDLE = 1, 2, 3

-- A node. N_COUNT: number of resources. N_KNOWN: 1; 0: devices only; -1: gone. N_NAMES: the
-- resources' names, each before a line feed. From N_AMOUNTS on: room and used of each.
local N_COUNT, N_VERSION, N_KNOWN, N_NUMBER, N_NAME, N_NAMES, N_AMOUNTS = 1, 2, 3, 4, 5, 6, 7

-- A lease: these numbers, a slot (-1: none) and a fence per share, and two MessagePack arrays: tags
-- (each but the last before a line feed), resources as JSON {name, amount, ...}, pod, gang and what
-- no script looks at, L_LENGTH bytes; and what it takes (see takes_at).
local LEASE, LEASE_BYTES, GRANT, GRANT_BYTES = '<BddddHH', 37, 'i4d', 12
local L_STATE, L_VERSION, L_ORIGIN, L_CREATED, L_EXPIRES, L_COUNT, L_LENGTH = 1, 2, 3, 4, 5, 6, 7
local RESERVED, BOUND, ACTIVE, RELEASED, EXPIRED = 1, 2, 3, 4, 5

-- What a reservation takes: {node, position of the last hold, holds (from TAKES: uuid, MiB, cores,
-- shares, new slots, company, slots there are in its dialect (0: D_SLOTS), MIG layout per device),
-- places (per share: number of the hold, and of the slot among its new ones; 0: none; below 0: it is
-- the position -1 - place of the layout)}.
local TAKES, HOLD, MAX_ARGS = 3, 8, 4000

local meta =
  call('HMGET', P .. 'ledger', 'ready', 'epoch', 'seq', 'capacity', 'feed', 'floor', 'numbered', 'claims',
    'format')
-- The number of the format of all that is stored under the prefix, but for `ledger`, which every version must be
-- able to read. A ledger of an older format is as good as empty; one of a newer format is not touched.
meta.format = 1
if meta[2] and tonumber(meta[9]) ~= meta.format then
  local formats = meta[9] .. ' ' .. meta.format
  if tonumber(meta[9]) > meta.format then return redis.error_reply('FORMAT ' .. formats) end
  if ARGV[3] ~= 'any' then return redis.error_reply('NOTREADY ' .. formats) end
  meta[1], meta[2] = false, false
end
if ARGV[3] ~= 'any' and (not meta[2] or (ARGV[3] == 'ready' and meta[1] ~= '1')) then
  return redis.error_reply('NOTREADY')
end
local epoch = meta[2] or ''
local seq, capacity = tonumber(meta[3] or 0), tonumber(meta[4] or 0)
if meta[1] == '1' and tonumber(ARGV[6]) > seq then
  call('HSET', P .. 'ledger', 'ready', 0, 'seq', ARGV[6])
  return redis.error_reply('LOSTWRITES ' .. string.format('%.0f', tonumber(ARGV[6]) - seq))
end
local feed, floor, numbered = tonumber(meta[5] or 0), tonumber(meta[6] or 0), tonumber(meta[7] or 0)
local claimed = tonumber(meta[8] or 0)
local first_seq, first_capacity = seq, capacity

local caches = {nodes = {}, devices = {}, leases = {}}
local nodes, devices, leases = caches.nodes, caches.devices, caches.leases
local changed_nodes, changed_devices, inventories = {}, {}, {}
local freed, due, on, written, joining = {}, {}, {}, {}, {}

-- A script has at most 200 local names, and some have nearly as many: what only one function needs
-- is local to it.
local node_format
do
  local formats = {}
  function node_format(count)
    local format = formats[count]
    if not format then
      format = '<BdbI4Bc0Hc0' .. string.rep('dd', count)
      formats[count] = format
    end
    return format
  end
end

local function node_value(node)
  local name, names, count = node[N_NAME], node[N_NAMES], node[N_COUNT]
  return packed(node_format(count), count, node[N_VERSION], node[N_KNOWN], node[N_NUMBER], #name,
    name, #names, names, unpack(node, N_AMOUNTS, N_AMOUNTS + 2 * count - 1))
end

local function device_value(device)
  local memory, slots, ok, unit, used, cores, shares, fence, alone, mode, uuid, node, taken, tags,
    layout = unpack(device, 1, 15)
  return packed(DEVICE, memory, slots, ok, unit, used, cores, shares, fence, alone, mode, #uuid,
    uuid, #node, node, #taken, taken, #tags, tags, #layout, layout)
end

-- Leases stay packed until somebody looks at them.
local readers = {
  nodes = function(value) return {unpacked(node_format(string.byte(value)), value)} end,
  devices = function(value) return {unpacked(DEVICE, value)} end,
  leases = function(value) return value end,
}

local function fetch(kind, names)
  local cache, read, asked = caches[kind], readers[kind], {}
  for i = 1, #names do
    local name = names[i]
    if cache[name] == nil then
      cache[name] = false
      asked[#asked + 1] = name
    end
  end
  for from = 1, #asked, MAX_ARGS do
    local found = call('HMGET', P .. kind, unpack(asked, from, math.min(from + MAX_ARGS - 1, #asked)))
    for i = 1, #found do
      if found[i] then cache[asked[from + i - 1]] = read(found[i]) end
    end
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

local function new_node(name)
  numbered = numbered + 1
  nodes[name] = {0, 0, 0, numbered, name, ''}
  return nodes[name]
end

local function new_device(uuid, node, unit, ok)
  devices[uuid] = {0, 0, ok, unit, 0, 0, 0, floor, 0, 0, uuid, node, '', '', ''}
  return devices[uuid]
end

-- Rows of nodes and devices without what `struct` leaves behind, to be answered with.
local function node_row(node)
  return {unpack(node, 1, N_AMOUNTS + 2 * node[N_COUNT] - 1)}
end

local function device_row(device)
  return {unpack(device, 1, D_LAYOUT)}
end

local function uuids_on(name)
  local uuids = call('HGET', P .. 'facts:' .. name, 'uuids')
  return uuids and decode(uuids) or {}
end

local function pods_on(node)
  return call('ZRANGEBYSCORE', P .. 'on', node[N_NUMBER], node[N_NUMBER])
end

-- What is told of the resources that a node serves: of one that is shut, why. See shared.model.node.
local function told_served(name, served)
  local why = call('HGET', P .. 'shut', name)
  return why and cjson.encode({'leasehold.dev/shut: ' .. why}) or served or '[]'
end

local function touch_node(name)
  changed_nodes[name] = true
end

local function next_version()
  seq = seq + 1
  return seq
end

local grown = false

local function free_on(name)
  freed[name] = true
end

-- Something is there that was not: what could never fit may fit now.
local function grow_on(name)
  freed[name], grown = true, true
end

local function opened(value)
  return {unpacked(LEASE, value)}
end

local function put_lease(pod, value)
  leases[pod] = value
  written[#written + 1] = pod
  written[#written + 1] = value
end

-- Write a lease whose numbers have changed, and return it.
local function put_changed(pod, lease, value)
  value = packed(LEASE, unpack(lease, 1, L_LENGTH)) .. string.sub(value, LEASE_BYTES + 1)
  put_lease(pod, value)
  return value
end

local function grants_of(lease, value)
  return {unpacked('<' .. string.rep(GRANT, lease[L_COUNT]), value, LEASE_BYTES + 1)}
end

-- What the array at `at` (from 0) takes. One share: node, uuid, MiB, cores, slotted, slots, company,
-- and what no script looks at. Else: node, false, all that it takes.
local function takes_at(text, at)
  local _, node, uuid, memory, cores, slotted, slots, company = pieces(text, 7, at + 1)
  if not uuid then return memory end
  local slot = slotted and 1 or 0
  return {node, 10, uuid, memory, cores, 1, slot, company, slots, '', 1, slot}
end

local function takes_of(lease, value)
  return takes_at(value, LEASE_BYTES + GRANT_BYTES * lease[L_COUNT] + lease[L_LENGTH])
end

local resources_in
do
  local texts = {}
  function resources_in(text)
    local resources = texts[text]
    if not resources then
      resources = parse(text)
      texts[text] = resources
    end
    return resources
  end
end

-- Its tags, resources, pod, gang and namespace.
local function about(lease, value)
  local _, tags, text, pod, gang, namespace =
    pieces(value, 5, LEASE_BYTES + GRANT_BYTES * lease[L_COUNT] + 1)
  return tags, resources_in(text), pod, gang, namespace
end
