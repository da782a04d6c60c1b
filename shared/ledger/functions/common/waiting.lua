-- Waiting pods: their queues, and the free capacity for them. `fits_on_device` counts by amounts alone how many pods of
-- a group may fit: it is called for each group and each freed node, and a placer decides about each pod.
local capacity = require('capacity')
local constants = require('constants')
local fair = require('fair')
local layouts = require('layouts')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local values = require('values')
local call, encode = redis.call, cmsgpack.pack
local D, W = layouts.DEVICE, layouts.WAITING
local EXCLUSIVE, BEST_EFFORT, IDLE_DEVICE = constants.EXCLUSIVE, constants.BEST_EFFORT, constants.IDLE_DEVICE
local GANG_PAGE = 64
local MAX_GROUPS, MAX_PER_GROUP = 64, 4 -- to which capacity is offered
local OFFER_S = 2 -- how long an offer is open

-- Instead of a group: capacity is offered to another pod of its gang, or to none.
local NO_OFFERS = '-'

local M = {NO_OFFERS = NO_OFFERS, OFFER_S = OFFER_S}
local needs, uuids_by_node, most_free_on, freed_at, unit
server.on_begin(function()
  needs, uuids_by_node, most_free_on, freed_at = {}, {}, {}, {}
  unit = 1 -- MiB per unit of the device that was looked at last
end)

-- The range of all members of a gang in a set of {gang|...}.
local function gang_range(gang) return '[' .. gang .. '|', '(' .. gang .. '}' end

-- How many pods of the gang hold a live lease.
function M.gang_lease_count(gang) return call('ZLEXCOUNT', server.prefix .. 'gang-leases', gang_range(gang)) end

function M.gang_waiting_count(gang)
  return call('ZLEXCOUNT', server.prefix .. 'gang-waiting', gang_range(gang))
end

-- The pods of the gang in one of these two sets, in order.
function M.gang_pods(set, gang)
  local pods = {}
  for i, entry in ipairs(call('ZRANGEBYLEX', server.prefix .. set, gang_range(gang))) do
    pods[i] = string.match(entry, set == 'gang-leases' and '^[^|]*|(.*)$' or '^[^|]*|[^|]*|(.*)$')
  end
  return pods
end

-- The pods with leases of a gang of which none is bound; of another gang none.
function M.reserved_gang(gang)
  local members = M.gang_pods('gang-leases', gang)
  for from = 1, #members, GANG_PAGE do
    local page = {unpack(members, from, math.min(from + GANG_PAGE - 1, #members))}
    records.fetch('leases', page)
    for _, pod in ipairs(page) do
      local of_pod = records.leases[pod]
      if of_pod and of_pod.numbers[layouts.NUMBERS.STATE] ~= constants.RESERVED then return {} end
    end
  end
  return members
end

-- Let the verdicts of the gang's waiting pods be decided again.
function M.mark_gang_changed(gang) call('SADD', server.prefix .. 'changed-gangs', gang) end

-- A waiting pod that cannot be read counts as missing, until it is queued again.
function M.waiting_of(value) return values.record(value, W) end

-- The gang's first waiting pod, and what it waits with, or nil.
function M.first_of_gang(gang)
  local from, to = gang_range(gang)
  local entry = call('ZRANGEBYLEX', server.prefix .. 'gang-waiting', from, to, 'LIMIT', 0, 1)[1]
  local pod = entry and string.match(entry, '^[^|]*|[^|]*|(.*)$')
  return pod, pod and M.waiting_of(call('HGET', server.prefix .. 'waiting', pod))
end

function M.remove_waiting(pods)
  if #pods == 0 or call('EXISTS', server.prefix .. 'waiting') == 0 then return end
  local found, changed_queues = server.call_all('HMGET', 'waiting', pods), {}
  for i, pod in ipairs(pods) do
    local waiting = M.waiting_of(found[i])
    if waiting then
      local group, gang, namespace = waiting[W.GROUP], waiting[W.GANG], waiting[W.NAMESPACE]
      local member = waiting[W.ORDER] .. '|' .. pod
      call('HDEL', server.prefix .. 'waiting', pod)
      call('ZREM', server.prefix .. 'offers', member)
      if gang ~= '' then call('ZREM', server.prefix .. 'gang-waiting', gang .. '|' .. member) end
      if group ~= NO_OFFERS then
        call('ZREM', server.prefix .. 'verdicts', member)
        call('ZREM', fair.queue(namespace, group), member)
        changed_queues[fair.queue(namespace, group)] = {namespace, group}
        if call('HINCRBY', server.prefix .. 'waiting-groups', group, -1) <= 0 then
          call('HDEL', server.prefix .. 'waiting-groups', group)
        end
      end
    end
  end
  for _, queue in pairs(changed_queues) do fair.reorder(queue[1], queue[2]) end
end

-- Remove a pod whose record cannot be read: nothing says in which queue it is.
function M.forget(pod)
  call('HDEL', server.prefix .. 'waiting', pod)
  local function remove_from(set, pattern)
    local count = 0
    for _, entry in ipairs(call('ZRANGE', set, 0, -1)) do
      if string.match(entry, pattern) == pod then count = count + call('ZREM', set, entry) end
    end
    return count
  end
  remove_from(server.prefix .. 'verdicts', '^[^|]*|(.*)$')
  remove_from(server.prefix .. 'offers', '^[^|]*|(.*)$')
  remove_from(server.prefix .. 'gang-waiting', '^[^|]*|[^|]*|(.*)$')
  for _, group in ipairs(call('HKEYS', server.prefix .. 'waiting-groups')) do
    for _, entry in ipairs(call('ZRANGE', server.prefix .. 'group-order:' .. group, 0, -1)) do
      local namespace = string.match(entry, '|(.*)$')
      if remove_from(fair.queue(namespace, group), '^[^|]*|(.*)$') > 0 then
        fair.reorder(namespace, group)
        if call('HINCRBY', server.prefix .. 'waiting-groups', group, -1) <= 0 then
          call('HDEL', server.prefix .. 'waiting-groups', group)
        end
      end
    end
  end
end

-- Write a waiting pod, as decided at the capacity number `verdict`. It waits since its first verdict, and the reason of
-- kube-scheduler stays.
function M.put_waiting(pod, need, order, verdict, record, since, gang, receives_offers, namespace)
  if #record > constants.MOST_WAITING_BYTES then return end
  local known, scheduler_reason = M.waiting_of(call('HGET', server.prefix .. 'waiting', pod)), ''
  if known then
    since, scheduler_reason = known[W.SINCE], known[W.SCHEDULER_REASON]
    M.remove_waiting({pod})
  end
  local member, group = order .. '|' .. pod, receives_offers and need or NO_OFFERS
  call('HSET', server.prefix .. 'waiting', pod,
    encode({group, order, verdict, since, record, gang, need, namespace, scheduler_reason}))
  if gang ~= '' then call('ZADD', server.prefix .. 'gang-waiting', 0, gang .. '|' .. member) end
  if receives_offers then
    call('ZADD', server.prefix .. 'verdicts', verdict, member)
    call('HINCRBY', server.prefix .. 'waiting-groups', group, 1)
    call('ZADD', fair.queue(namespace, group), 0, member)
    fair.reorder(namespace, group)
  end
end

-- Write why kube-scheduler has not placed a pod that waits, beside its verdict.
function M.put_scheduler_reason(pod, reason)
  local known = M.waiting_of(call('HGET', server.prefix .. 'waiting', pod))
  if not known then return end
  known[W.SCHEDULER_REASON] = reason
  call('HSET', server.prefix .. 'waiting', pod, encode(known))
end

-- The capacity number at which a namespace last had more left of its quota.
function M.quota_freed(namespace)
  local found = call('HMGET', server.prefix .. 'quota-freed', namespace, '*')
  return math.max(tonumber(found[1] or 0), tonumber(found[2] or 0))
end

-- The namespace whose quota the pods of this group wait for, or nil.
function M.quota_namespace(group) return string.match(group, '^q:[%d:]*|(.*)$') end

-- {namespace -> those of the groups whose pods wait for its quota}.
function M.quota_groups(groups)
  local of_namespaces = {}
  for _, group in ipairs(groups) do
    local namespace = M.quota_namespace(group)
    if namespace then
      of_namespaces[namespace] = of_namespaces[namespace] or {}
      values.append(of_namespaces[namespace], group)
    end
  end
  return of_namespaces
end

local function need_of(group)
  local need = needs[group] or {}
  if not needs[group] then
    for part in string.gmatch(group, '%d+') do need[#need + 1] = tonumber(part) end
    needs[group] = need
  end
  return unpack(need)
end

-- The smallest need of the group's pods, without the quota that they wait for; '' if there is no need.
local function plain_need(group) return string.match(group, '^q:([%d:]*)|') or group end

-- The approximate demand of a pod of the group: cores, and MiB. The exact one is known after placement.
function M.need_of(group)
  local need = plain_need(group)
  if need == '' then return 0, 0 end
  local gpus, units, percent, cores, _, _, mib = need_of(need)
  local total = fair.total_of()
  local device_mib = 100 * total[2] / total[1]
  if units == 0 and percent == 0 and mib == 0 then return 100 * gpus, device_mib * gpus end
  local per_gpu = mib > 0 and mib or percent > 0 and device_mib * percent / 100 or units * unit
  return cores * gpus, per_gpu * gpus
end

local function needed_memory(device, units, percent, mib)
  local device_unit = device[D.UNIT_MIB]
  if percent > 0 then
    return math.floor(math.floor(device[D.MEMORY_MIB] / device_unit) * percent / 100) * device_unit
  end
  if mib > 0 then return mib end
  if units > 0 then return units * device_unit end
  return device[D.MEMORY_MIB]
end

-- How often the need fits on the device; policies are not considered for MIG instances.
local function fits_on_device(device, units, percent, cores, policy, slotted, mib, slots)
  local is_mig, memory_taken, cores_taken, shares_taken = device[D.IS_MIG], capacity.taken_of(device)
  if not is_mig then
    if cores_taken >= 100 and policy ~= BEST_EFFORT then return 0 end
    if (policy == EXCLUSIVE or policy == IDLE_DEVICE) and shares_taken > 0 then return 0 end
  end
  unit = device[D.UNIT_MIB]
  local need = needed_memory(device, units, percent, mib)
  local times = need > 0 and math.floor((device[D.MEMORY_MIB] - memory_taken) / need) or 64
  if is_mig then
    -- A pod that requests all memory gets the largest instance, which may be any part of the device.
    if need > device[D.MEMORY_MIB] - unit and memory_taken < need then times = 1 end
    return times
  end
  if cores > 0 then times = math.min(times, math.floor((100 - cores_taken) / cores)) end
  if slotted == 1 then
    times = math.min(times, (slots > 0 and slots or device[D.SLOTS]) - shares_taken)
  end
  return times
end

-- What is free at most on one of the node's devices: MiB, units and cores. Within a call this only decreases.
local function most_on(name)
  if most_free_on[name] then return most_free_on[name] end
  local uuids, most = records.device_uuids(name), {mib = 0, units = 0, cores = 0}
  records.fetch('devices', uuids)
  for _, uuid in ipairs(uuids) do
    local device = records.devices[uuid]
    if device and device[D.IS_MIG] then
      most = {mib = math.huge, units = math.huge, cores = math.huge} -- see `fits_on_device`
    elseif device then
      local memory_taken, cores_taken = capacity.taken_of(device)
      local free_mib = device[D.MEMORY_MIB] - memory_taken
      most.mib, most.units = math.max(most.mib, free_mib), math.max(most.units, free_mib / device[D.UNIT_MIB])
      most.cores = math.max(most.cores, 100 - cores_taken)
    end
  end
  uuids_by_node[name], most_free_on[name] = uuids, most
  return most
end

-- The same on one of several nodes, each followed by a number.
function M.most_free(nodes_and_numbers)
  local most = {mib = 0, units = 0, cores = 0}
  for name in values.each_pair(nodes_and_numbers) do
    for amount, free in pairs(most_on(name)) do most[amount] = math.max(most[amount], free) end
  end
  return most
end

-- Whether pods of the group need more than is free at most on one device.
function M.exceeds(group, most)
  local gpus, units, percent, cores, _, _, mib = need_of(plain_need(group))
  return gpus and gpus > 0
    and (mib > most.mib or cores > most.cores or percent == 0 and mib == 0 and units > most.units)
end

-- How many pods of the group could fit on the node, by their smallest need alone.
function M.room_for(group, name)
  group = plain_need(group)
  if group == '' then return 0 end
  local gpus, units, percent, cores, policy, slotted, mib, slots = need_of(group)
  if gpus == 0 then return 1 end
  if M.exceeds(group, most_on(name)) then return 0 end
  local times, fitting_devices = 0, 0
  for _, uuid in ipairs(uuids_by_node[name]) do
    local device = records.devices[uuid]
    if device and device[D.STATUS] == 1 and device[D.NODE] == name
      and not device[D.EXCLUSIVE] and (not device[D.IS_CLAIMED] or device[D.CLAIMED_UNTIL] > 0) then
      local n = fits_on_device(device, units, percent, cores, policy, slotted, mib, slots)
      if n > 0 then fitting_devices, times = fitting_devices + 1, times + n end
    end
  end
  if fitting_devices < gpus then return 0 end
  return math.max(1, math.floor(times / gpus))
end

local function is_offering(now)
  if call('EXISTS', server.prefix .. 'waiting') == 0 then return false end
  return server.number_at('ledger', 'offered_up_to') < ledger.capacity
    or call('ZCOUNT', server.prefix .. 'offers', '(' .. now - OFFER_S, '+inf') > 0
end

-- Return whether a pod of this queue can come before one of the requests, {namespace -> its lowest rank}.
local function may_come_before(entry, lowest_ranks)
  local rank = string.sub(entry, 2, 11)
  for namespace, lowest in pairs(lowest_ranks) do
    if string.match(entry, '|(.*)$') ~= namespace then
      if entry < fair.sort_prefix(namespace, lowest, {1e15, 0}) then return true end
    elseif rank < lowest then
      return true
    end
  end
  return false
end

-- Waiting pods to which capacity is or will be offered: the first few of each group, with their sort key,
-- their verdict, and whether their offer is open. With a `gang`, without its own pods.
function M.pending_offers(now, lowest_ranks, gang)
  local pending = {}
  if not is_offering(now) then return pending end
  local groups = call('HKEYS', server.prefix .. 'waiting-groups')
  for g = 1, math.min(#groups, MAX_GROUPS) do
    local group, left = groups[g], groups[g] ~= '' and MAX_PER_GROUP or 0
    local entries =
      left > 0 and call('ZRANGE', server.prefix .. 'group-order:' .. group, 0, MAX_PER_GROUP - 1) or {}
    for _, entry in ipairs(entries) do
      if left == 0 or not may_come_before(entry, lowest_ranks) then break end
      local namespace = string.match(entry, '|(.*)$')
      for _, member in ipairs(call('ZRANGE', fair.queue(namespace, group), 0, left - 1)) do
        left = left - 1
        local offered_at = tonumber(call('ZSCORE', server.prefix .. 'offers', member) or 0)
        local verdict = tonumber(call('ZSCORE', server.prefix .. 'verdicts', member) or ledger.capacity)
        local is_pending = offered_at > now - OFFER_S or verdict < ledger.capacity
        if is_pending and not (gang and call('ZSCORE', server.prefix .. 'gang-waiting', gang .. '|' .. member)) then
          local rank = string.sub(member, 1, 10)
          pending[#pending + 1] = {
            sort_prefix = fair.sort_prefix(namespace, rank), rank = rank, namespace = namespace,
            group = group, verdict = verdict, is_open = offered_at > now - OFFER_S,
            pod = string.match(member, '|(.*)$'),
          }
        end
      end
    end
  end
  return pending
end

-- The capacity number that a pod's verdict was decided at: an offer raises the one in `verdicts`. What was freed later
-- may be its own; as may be any node's capacity once its quota has more left.
local function decided_at(offer)
  if offer.is_open and not offer.decided_at then
    local pod = M.waiting_of(call('HGET', server.prefix .. 'waiting', offer.pod))
    local of_quota = M.quota_namespace(offer.group)
    offer.decided_at = pod and not of_quota and tonumber(pod[W.VERDICT]) or -1
  end
  return offer.decided_at or offer.verdict
end

-- Return whether the node's free capacity is reserved for a pod that comes before this one. Between pods
-- of one namespace only the rank counts.
function M.is_reserved_for_other(pending, pod, namespace, rank, name)
  local own_prefix = fair.sort_prefix(namespace, rank, fair.added[namespace])
  for _, offer in ipairs(pending) do
    local is_before = offer.sort_prefix < own_prefix
    if offer.namespace == namespace then is_before = offer.rank < rank end
    if is_before and offer.pod ~= pod then
      freed_at[name] = freed_at[name] or tonumber(call('ZSCORE', server.prefix .. 'freed-nodes', name) or 0)
      if decided_at(offer) < freed_at[name] and M.room_for(offer.group, name) > 0 then return true end
    end
  end
  return false
end

return M
