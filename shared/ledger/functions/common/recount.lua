-- Setting records aside that cannot be decoded. What a lease counts for is in totals of its devices, node and
-- namespace, and nothing else says how much of them it was: they are computed again from the leases and claims that can
-- be read. `restore` then adds the leases that were set aside, in the same call: what their pods use is never free in
-- between.
local capacity = require('capacity')
local claims = require('claims')
local constants = require('constants')
local fair = require('fair')
local kinds = require('kinds')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local quota = require('quota')
local records = require('records')
local repelling = require('repelling')
local server = require('server')
local values = require('values')
local waiting = require('waiting')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode
local B, C, D, DEMAND, N = layouts.BOOKING, layouts.CLAIM, layouts.DEVICE, layouts.DEMAND, layouts.NODE
local NUMBERS, REQUEST = layouts.NUMBERS, layouts.REQUEST
local MOST_REMEMBERED, REMEMBERED_S = 256, 86400

local M = {}
local pods_on, sizes_of -- of this call: affected node -> pods with leases there; nodes whose size is counted again
local has_lost_claims, has_lost_groups, has_lost_charges
server.on_begin(function()
  M.unreadable_key = server.prefix .. 'unreadable'
  pods_on, sizes_of = {}, {}
  has_lost_claims, has_lost_groups, has_lost_charges = false, false, false
end)

-- Remember damaged records for a day, for people: names are 'kind key'.
function M.remember(names)
  for _, name in ipairs(names) do
    if call('HLEN', M.unreadable_key) < MOST_REMEMBERED then
      call('HSET', M.unreadable_key, name, server.time()[1])
    end
  end
  call('EXPIRE', M.unreadable_key, REMEMBERED_S)
end

-- Count a lease that has its slots and fences: in devices, node, namespace and indexes. Its quota is charged apart.
function M.add_lease(pod, of_pod, expires_at)
  local demand, request = of_pod.demand, of_pod.request
  for _, device, slot, fence in capacity.each_share(demand, of_pod.numbers[NUMBERS.GRANTS]) do
    if slot >= 0 then capacity.set_slot(device, slot, '1') end
    device[D.FENCE] = math.max(device[D.FENCE], fence)
  end
  fair.add_demand(request[REQUEST.NAMESPACE], demand, 1)
  capacity.add_demand(demand, lease.resources_of(request), request[REQUEST.GROUPS], 1)
  capacity.index_lease(pod, records.node_of(demand[DEMAND.NODE]), request[REQUEST.GANG])
  if expires_at > 0 then capacity.expire_at(pod, expires_at) end
end

-- The name of the node with this number, or nil.
local function node_with(number)
  for name, node in server.each_record(server.prefix .. 'nodes', N) do
    if node[N.NUMBER] == number then return name end
  end
end

-- For each kind, what takes a record away; without one it is only deleted.
local removers = {}

function removers.leases(pod)
  records.forget('leases', pod)
  call('ZREM', server.prefix .. 'lease-nodes', pod)
  call('SREM', server.prefix .. 'vanished', pod)
  call('ZREM', server.prefix .. 'silent', pod)
  for _, entry in ipairs(call('ZRANGE', server.prefix .. 'gang-leases', 0, -1)) do
    if string.match(entry, '^[^|]*|(.*)$') == pod then call('ZREM', server.prefix .. 'gang-leases', entry) end
  end
  repelling.remove({pod})
  has_lost_charges = true
end

-- Fences of a device only rise: they continue above all that can have been given.
function removers.devices(uuid)
  records.forget('devices', uuid)
  ledger.fence_floor = math.max(ledger.fence_floor, server.now_in_ms())
end

function removers.nodes(name) records.forget('nodes', name) end

removers.waiting = waiting.forget

-- It allows nothing until it is saved again: without it, its namespace would have no limit.
function removers.quotas() end

function removers.expiring()
  for group in values.each_pair(call('ZRANGE', server.prefix .. 'expiring', 0, -1, 'WITHSCORES')) do
    if not values.record(group, layouts.EXPIRING) then call('ZREM', server.prefix .. 'expiring', group) end
  end
  has_lost_groups = true
end

function removers.claims(pod)
  local number = tonumber(call('ZSCORE', server.prefix .. 'claim-nodes', pod) or -1)
  call('HDEL', server.prefix .. 'claims', pod)
  call('ZREM', server.prefix .. 'claim-nodes', pod)
  claims.save_count()
  local name = node_with(number)
  if name then pods_on[name] = {} end
end

removers['preemption:preemptions'] = function(id)
  call('HDEL', kinds.key('preemption:preemptions'), id)
  has_lost_claims = true
end

function removers.starts(id)
  call('HDEL', server.prefix .. 'starts', id)
  has_lost_claims = true
end

removers['node-sizes'] = function(name)
  call('HDEL', server.prefix .. 'node-sizes', name)
  sizes_of[name] = true
end

-- Node and annotations are synchronized as if the lease had just been resized.
function removers.unsynced(pod)
  local of_pod = records.lease_of(pod)
  if of_pod then
    call('HSET', server.prefix .. 'unsynced', pod, encode({of_pod.numbers[NUMBERS.VERSION], 0}))
  else
    call('HDEL', server.prefix .. 'unsynced', pod)
  end
end

removers['quota-charges'] = function(pod)
  call('HDEL', server.prefix .. 'quota-charges', pod)
  has_lost_charges = true
end

removers['quota-used'] = function(namespace)
  call('HDEL', server.prefix .. 'quota-used', namespace)
  has_lost_charges = true
end

local function remove(kind, name)
  if removers[kind] then
    removers[kind](name)
  else
    call('HDEL', kinds.key(kind), name)
  end
end

-- End claims whose preemption or planned start is gone.
local function end_unowned_claims()
  local owners, texts = {}, call('HVALS', server.prefix .. 'starts')
  for _, stored in server.each_record(kinds.key('preemption:preemptions'), layouts.PREEMPTION) do
    texts[#texts + 1] = stored[layouts.PREEMPTION.PREEMPTION]
  end
  for _, text in ipairs(texts) do
    for _, wanted in ipairs(values.readable(text, parse_json).wanted or {}) do owners[wanted.pod] = true end
  end
  for pod in server.each_record(server.prefix .. 'claims', C) do
    local claim = not owners[pod] and claims.suspend(pod)
    if claim then claims.resume(pod, claim, true) end
  end
  claims.delete_ended()
end

-- Read all leases: count the use of namespaces anew, and cache those on affected nodes.
local function read_leases()
  for namespace in values.each_pair(call('HGETALL', server.prefix .. 'used-cores')) do fair.add(namespace, 0, 0) end
  for namespace in values.each_pair(call('HGETALL', server.prefix .. 'used-mib')) do fair.add(namespace, 0, 0) end
  call('DEL', server.prefix .. 'used-cores', server.prefix .. 'used-mib')
  local cursor, is_read = '0', {}
  repeat
    local page = call('HSCAN', server.prefix .. 'leases', cursor, 'COUNT', 1000)
    for pod, value in values.each_pair(page[2]) do
      local of_pod = not is_read[pod] and lease.read(value)
      if of_pod then
        is_read[pod] = true
        local pods, numbers = pods_on[of_pod.demand[DEMAND.NODE]], of_pod.numbers
        if pods then
          records.leases[pod] = of_pod
          pods[#pods + 1] = pod
        else
          fair.add_demand(of_pod.request[REQUEST.NAMESPACE], of_pod.demand, 1)
        end
        if has_lost_groups and numbers[NUMBERS.STATE] == constants.RESERVED then
          capacity.expire_at(pod, numbers[NUMBERS.EXPIRES_AT])
        end
      end
    end
    cursor = page[1]
  until cursor == '0'
end

-- The claims on a node, by pod.
local function claims_on(name)
  local found = {}
  for pod, claim in server.each_record(server.prefix .. 'claims', C) do
    if claim[C.NODE] == name then found[pod] = claim end
  end
  return found
end

-- A node whose record was set aside, with the number by which leases and claims find it. It takes new leases once it
-- is saved again.
local function new_node(name, pods, of_pods)
  local node = records.new_node(name)
  local number = pods[1] and tonumber(call('ZSCORE', server.prefix .. 'lease-nodes', pods[1]) or nil)
  local _, claim = next(of_pods)
  node[N.NUMBER] = number or claim and claim[C.NODE_NUMBER] or node[N.NUMBER]
  return node
end

-- The devices of a node: those that were reported, and those of leases.
local function devices_on(name, pods)
  local uuids, is_listed = records.device_uuids(name), {}
  for _, uuid in ipairs(uuids) do is_listed[uuid] = true end
  for _, pod in ipairs(pods) do
    for _, booking in ipairs(records.leases[pod].demand[DEMAND.BOOKINGS]) do
      if not is_listed[booking[B.DEVICE]] then
        uuids[#uuids + 1], is_listed[booking[B.DEVICE]] = booking[B.DEVICE], true
      end
    end
  end
  records.fetch('devices', uuids)
  return uuids
end

local function recount_node(name, pods)
  local of_pods = claims_on(name)
  local node = records.node_of(name) or new_node(name, pods, of_pods)
  for _, at in pairs(capacity.resource_positions(node)) do node[N.AMOUNTS][at + 1] = 0 end
  local uuids = devices_on(name, pods)
  for _, uuid in ipairs(uuids) do
    local device = records.device_of(uuid) or records.new_device(uuid, name, 1, 0)
    if device[D.NODE] == name then records.clear_use(device) end
  end
  call('HSET', server.prefix .. 'facts:' .. name, 'uuids', encode(uuids))
  for _, pod in ipairs(pods) do M.add_lease(pod, records.leases[pod], 0) end
  for _, claim in pairs(of_pods) do
    if claims.node_of(claim) then
      claims.mark_devices(claim, true)
      claims.add_reserved(claim, 1)
    end
  end
  records.mark_freed(name)
  if node[N.STATUS] == 1 then records.mark_inventory_changed(name) else records.changed_nodes[name] = true end
end

-- Set records aside, rows of {kind, key, node}; what was theirs is free until the call adds it again.
function M.without(damaged)
  local names = {}
  for i, row in ipairs(damaged) do
    names[i] = row[1] .. ' ' .. row[2]
    if row[3] ~= '' then pods_on[row[3]] = {} end
    remove(row[1], row[2])
  end
  M.remember(names)
  if has_lost_claims then end_unowned_claims() end
  read_leases()
  for name, pods in pairs(pods_on) do recount_node(name, pods) end
  fair.recount_sizes(sizes_of)
  fair.load_entitlements()
  if has_lost_charges and ledger.has_quotas then quota.recount() end
end

return M
