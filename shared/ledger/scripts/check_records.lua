-- Check the server's policy, and pages of records with what is derived from them. Arguments: cursors of
-- leases, nodes and waiting pods ('0': from the beginning); records per page. Returns the next cursors; what
-- is missing, as texts; {kind, key, node or '', ...} of records that cannot be read; and whether a pod that
-- is gone must be listed again. If anything is missing or cannot be read, the ledger is rebuilt.
local cursors, count = ARGS[1], ARGS[2]
local MOST_KEPT, KEPT_S, MOST_SHOWN, MOST_COUNTED, COUNT_AGAIN_S = 256, 86400, 256, 125, 600

local has_info, info = pcall(call, 'INFO', 'memory')
local policy = has_info and string.match(info, 'maxmemory_policy:(%S+)') or KEEPS_KEYS
if policy ~= KEEPS_KEYS then
  if state[11] ~= policy then call('HSET', PREFIX .. 'ledger', 'evicts', policy) end
  return redis.error_reply('EVICTS ' .. policy)
end
if state[11] then call('HDEL', PREFIX .. 'ledger', 'evicts') end
local missing, broken, must_list = {}, {}, false

local function expect(is_there, text)
  if not is_there and #missing < MOST_SHOWN then missing[#missing + 1] = text end
  return is_there
end

-- A key of a type that is not ours was written by something else, and has replaced what was there.
local KEYS_OF_TYPE = {
  hash = {'nodes', 'devices', 'leases', 'cordons', 'waiting', 'waiting-groups', 'used-cores', 'used-mib',
    'node-sizes', 'entitlements', 'quota-charges', 'quota-used', 'quota-freed', 'quota-offers', 'unreadable',
    'claims', 'starts', 'unsynced', 'repelling', 'stage:listings', 'stage:reports', 'stage:reported-at'},
  zset = {'lease-nodes', 'gang-leases', 'expiring', 'freed-nodes', 'gang-waiting', 'verdicts', 'offers', 'gone',
    'silent'},
  set = {'vanished', 'changed-gangs'}, stream = {'tenures'}, list = {'stage:report-order'},
}
local KEYS_BESIDE = {['-quotas'] = 'hash', ['-preemption:preemptions'] = 'hash', ['-preemption:budgets'] = 'hash',
  ['-preemption:evictions'] = 'stream', ['-preemption:leader'] = 'string'}

local function check_type(key, expected)
  local found = call('TYPE', key).ok
  if found ~= 'none' and found ~= expected then
    call('DEL', key)
    expect(false, key .. ', which was a ' .. found)
  end
end

for expected, keys in pairs(KEYS_OF_TYPE) do
  for _, key in ipairs(keys) do check_type(PREFIX .. key, expected) end
end
for key, expected in pairs(KEYS_BESIDE) do check_type(BESIDE .. key, expected) end

if has_lost_keys and state[10] then return redis.error_reply('LOSTKEYS ' .. vital_keys .. ' ' .. state[10]) end
if not is_ready then return redis.error_reply('NOTREADY') end

local function add_broken(kind, key, node, value)
  if #broken >= 3 * MOST_SHOWN then return end
  append(broken, kind, key, node)
  if call('HLEN', PREFIX .. 'unreadable') < MOST_KEPT then
    call('HSET', PREFIX .. 'unreadable', kind .. ' ' .. key,
      encode({tonumber(call('TIME')[1]), string.sub(value, 1, MOST_SHOWN)}))
  end
end

local function each_in_page(kind, at)
  local found = call('HSCAN', PREFIX .. kind, cursors[at], 'COUNT', count)
  cursors[at] = found[1]
  return each_pair(found[2])
end

local function check_keys()
  expect(call('HLEN', PREFIX .. 'leases') == call('ZCARD', PREFIX .. 'lease-nodes'), 'leases or lease-nodes')
  for _, key in ipairs({'claims', 'cordons', 'unsynced'}) do
    expect(call('HLEN', PREFIX .. key) == number_at('ledger', key), key)
  end
  local waiting = call('HLEN', PREFIX .. 'waiting')
  expect(call('ZCARD', PREFIX .. 'verdicts') <= waiting, 'waiting')
  expect(call('ZCARD', PREFIX .. 'gang-waiting') <= waiting, 'waiting')
  expect(call('HLEN', PREFIX .. 'entitlements') == call('HLEN', BESIDE .. '-preemption:budgets'), 'entitlements')
  expect(call('HLEN', quota.rules_key) == number_at('ledger', 'quotas'), 'quotas')
end

local function is_expiring(pod, at)
  for _, group in ipairs(call('ZRANGEBYSCORE', PREFIX .. 'expiring', at, at)) do
    for _, each in ipairs(readable(group)[2] or {}) do
      if each == pod then return true end
    end
  end
end

local function check_lease_indexes(pod, value)
  local header = header_of(value)
  local _, _, _, gang, namespace = description_of(header, value)
  local demand = demand_of(header, value)
  local is_vanished = call('SISMEMBER', PREFIX .. 'vanished', pod) == 1
  if not is_vanished and call('ZSCORE', PREFIX .. 'gone', pod) then must_list = true end
  local node = node_of(demand[1])
  local number = tonumber(call('ZSCORE', PREFIX .. 'lease-nodes', pod) or -1)
  expect(unreadable.nodes[demand[1]] or node and number == node[N_NUMBER], 'the node of lease ' .. pod)
  for d, uuid, device in each_device(demand) do
    expect(device or unreadable.devices[uuid], 'device ' .. uuid)
    expect(demand[d + 1] == 0 or call('HEXISTS', PREFIX .. 'used-mib', namespace) == 1, 'used-mib')
  end
  if gang ~= '' and not is_vanished and not must_list then
    expect(call('ZSCORE', PREFIX .. 'gang-leases', gang .. '|' .. pod), 'gang-leases')
  end
  if header[L_STATE] == RESERVED then expect(is_expiring(pod, header[L_EXPIRES]), 'expiring') end
  if quota.on and demand[2] >= FIRST_DEVICE and quota.rule_of(namespace) then
    expect(call('HEXISTS', PREFIX .. 'quota-charges', pod) == 1, 'quota-charges')
    expect(call('HEXISTS', PREFIX .. 'quota-used', namespace) == 1, 'quota-used')
  end
end

-- Numbers that are no totals of anything, although they have their places.
local function are_amounts(node)
  for at = N_AMOUNTS, N_AMOUNTS + 2 * node[N_RESOURCE_COUNT] - 1 do
    if not (node[at] <= MOST_AMOUNT and node[at] >= -MOST_AMOUNT) then return false end
  end
  return node[N_NAME] ~= nil
end

local function are_totals(device)
  return device[D_UNIT] >= 1 and device[D_MEMORY_USED] <= MOST_MIB and device[D_CORES_USED] <= 100
    and device[D_SHARES] <= MOST_MIB and device[D_FENCE] >= 0 and device[D_FENCE] <= MOST_AMOUNT
end

local function check_node_indexes(name, node)
  local stored = call('HMGET', PREFIX .. 'facts:' .. name, 'facts', 'uuids')
  local is_known = node[N_STATUS] == 1
  expect(not is_known or stored[1], 'facts:' .. name)
  expect(not is_known or call('ZSCORE', PREFIX .. 'freed-nodes', name), 'freed-nodes')
  local uuids, has_healthy = device_uuids(name), false
  expect(not stored[2] or stored[2] == encode(uuids), 'the devices of ' .. name)
  fetch('devices', uuids)
  for _, uuid in ipairs(uuids) do
    if unreadable.devices[uuid] or devices[uuid] and not are_totals(devices[uuid]) then
      add_broken('devices', uuid, name, call('HGET', PREFIX .. 'devices', uuid))
    elseif expect(devices[uuid], 'device ' .. uuid) then
      has_healthy = has_healthy or devices[uuid][D_STATUS] == 1 and devices[uuid][D_NODE] == name
    end
  end
  if is_known and has_healthy then expect(call('HEXISTS', PREFIX .. 'node-sizes', name) == 1, 'node-sizes') end
end

local function unused_device(uuid) return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, uuid, '', '', '', '', ''} end

-- Devices as they were with only the leases of a node, and what these use of the node; nil if one of them
-- cannot be read.
local function counted_use(node)
  local of_devices, of_node, pods = {}, {}, pods_on_node(node)
  fetch('leases', pods)
  for _, pod in ipairs(pods) do
    local value = leases[pod]
    if not value then return nil end
    local header = header_of(value)
    local demand = demand_of(header, value)
    local groups_text, resources = description_of(header, value)
    for i = 1, #resources, 2 do of_node[resources[i]] = (of_node[resources[i]] or 0) + resources[i + 1] end
    for d, uuid in each_device(demand) do
      of_devices[uuid] = of_devices[uuid] or unused_device(uuid)
      add_to_device(of_devices[uuid], 1, groups_text, unpack(demand, d + 1, d + 7))
    end
    for uuid, _, slot in each_share(demand, grants_of(header, value)) do
      if slot >= 0 and slot <= MOST_SLOT then set_slot(of_devices[uuid], slot, '1') end
    end
  end
  return of_devices, of_node, #pods
end

local function is_used_alike(device, counted)
  for _, at in ipairs({D_MEMORY_USED, D_CORES_USED, D_SHARES, D_SLOT_MAP, D_LAYOUT}) do
    if device[at] ~= counted[at] then return false end
  end
  return device[D_EXCLUSIVE] % 2 == counted[D_EXCLUSIVE] and #device[D_GROUPS] == #counted[D_GROUPS]
end

-- Totals of an older state of a key can be read, and are not those of its leases. A record that was found so
-- a short time ago is left to the audit: a rebuild has not helped.
local function add_wrong(kind, key, node, value)
  local time, kept = call('TIME'), readable(call('HGET', PREFIX .. 'unreadable', kind .. ' ' .. key))
  if math.abs(time[1] - (kept[1] or 0)) > COUNT_AGAIN_S then add_broken(kind, key, node, value) end
end

local function check_totals(name, node)
  local of_devices, of_node, count = counted_use(node)
  if not of_devices then return 0 end
  for _, uuid in ipairs(device_uuids(name)) do
    local device, counted = device_of(uuid), of_devices[uuid] or unused_device(uuid)
    if device and device[D_NODE] == name and not is_used_alike(device, counted) then
      add_wrong('devices', uuid, name, device_value(device))
    end
  end
  if claim_count > 0 then return count end -- they reserve resources, too
  for resource, at in pairs(resource_positions(node)) do
    if node[at + 1] ~= (of_node[resource] or 0) then
      add_wrong('nodes', name, name, node_value(node))
      break
    end
  end
  return count
end

-- Count the leases of some of these nodes, each time of others.
local function check_some_totals(names)
  local counted, first = 0, tonumber(call('TIME')[2])
  for i = 1, #names do
    if counted >= MOST_COUNTED then return end
    local name = names[(first + i) % #names + 1]
    counted = counted + check_totals(name, nodes[name])
  end
end

-- The use of each namespace, by its leases and by their charges to its quota.
local function check_namespaces()
  local names, charged = {}, {}
  for pod, stored in each_pair(call('HGETALL', PREFIX .. 'leases')) do
    local value = read_record('leases', pod, stored)
    leases[pod] = value
    if not value then return end
    local header = header_of(value)
    local _, _, _, _, namespace = description_of(header, value)
    fair.add_demand(namespace, demand_of(header, value), 1)
  end
  for _, charge in each_packed(PREFIX .. 'quota-charges') do
    local row = type(charge[2]) == 'table' and charge[2]['']
    if row then
      local sums = charged[charge[1]] or {0, 0, 0}
      charged[charge[1]] = sums
      for m = 1, 3 do sums[m] = sums[m] + row[m] end
    end
  end
  for _, key in ipairs({'used-cores', 'used-mib', 'quota-used'}) do
    for _, name in ipairs(call('HKEYS', PREFIX .. key)) do names[name] = true end
  end
  for name in pairs(fair.added) do names[name] = true end
  for name in pairs(names) do
    local used, sums = fair.added[name] or {0, 0}, charged[name] or {0, 0, 0}
    local cores, mib = call('HGET', PREFIX .. 'used-cores', name), call('HGET', PREFIX .. 'used-mib', name)
    local value = call('HGET', PREFIX .. 'quota-used', name)
    local stored = readable(value)[''] or {0, 0, 0}
    if tonumber(cores or 0) ~= used[1] or tonumber(mib or 0) ~= used[2]
      or stored[1] ~= sums[1] or stored[2] ~= sums[2] or stored[3] ~= sums[3] then
      add_wrong('namespaces', name, '', value or mib or '')
    end
  end
end

local function check_waiting_indexes(pod, waiting)
  local group, gang, namespace = waiting[W.GROUP], waiting[W.GANG], waiting[W.NAMESPACE]
  local member = waiting[W.ORDER] .. '|' .. pod
  if gang ~= '' then expect(call('ZSCORE', PREFIX .. 'gang-waiting', gang .. '|' .. member), 'gang-waiting') end
  if group == NO_OFFERS then return end
  expect(call('ZSCORE', PREFIX .. 'verdicts', member), 'verdicts')
  expect(call('HEXISTS', PREFIX .. 'waiting-groups', group) == 1, 'waiting-groups')
  expect(call('ZSCORE', fair.queue(namespace, group), member), 'the queue of ' .. namespace)
  local position = call('HGET', PREFIX .. 'queue-positions:' .. namespace, group)
  expect(position and call('ZSCORE', PREFIX .. 'group-order:' .. group, position), 'group-order')
end

local function check_pages()
  local is_beginning = cursors[1] == '0' and cursors[2] == '0' and cursors[3] == '0'
  check_keys()
  for pod, value in each_in_page('leases', 1) do
    leases[pod] = read_record('leases', pod, value)
    if leases[pod] then
      check_lease_indexes(pod, leases[pod])
    else
      add_broken('leases', pod, '', value)
    end
  end
  local sound = {}
  for name, value in each_in_page('nodes', 2) do
    nodes[name] = read_record('nodes', name, value)
    if nodes[name] and are_amounts(nodes[name]) then
      check_node_indexes(name, nodes[name])
      sound[#sound + 1] = name
    else
      add_broken('nodes', name, name, value)
    end
  end
  if #missing == 0 and #broken == 0 then
    check_some_totals(sound)
    if is_beginning and call('HLEN', PREFIX .. 'leases') <= 16 * MOST_COUNTED then check_namespaces() end
  end
  for pod, value in each_in_page('waiting', 3) do
    local waiting = waiting_of(value)
    if waiting then
      check_waiting_indexes(pod, waiting)
    else
      add_broken('waiting', pod, '', value)
    end
  end
end

-- A key of another type, or a part of a record that is of another, raises an error.
local is_checked, fault = pcall(check_pages)
if not is_checked then missing[1] = 'a key of its type: ' .. tostring(type(fault) == 'table' and fault.err or fault) end

for record, stored in each_packed(PREFIX .. 'unreadable') do
  if call('TIME')[1] - (stored[1] or 0) > KEPT_S then call('HDEL', PREFIX .. 'unreadable', record) end
end
if #missing > 0 or #broken > 0 then call('HSET', PREFIX .. 'ledger', 'ready', 0) end
return encode({cursors, missing, broken, must_list})
