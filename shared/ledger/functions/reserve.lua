-- Reserve for a batch of pods. Arguments: now; expires_at; pods; the number of candidates of each; start
-- and end of each piece in the tail (per pod its lease on the first candidate, without numbers, then demand
-- and shares on each other candidate: parts of a LeaseRecord; without candidates, request and description);
-- false, or {gang, number, whether the pods are further ones, leases}: so many of the gang must have leases after
-- this, for all or nothing, or before it, for each on its own, and before it exactly as many as `leases`, or -1 for
-- any number; each pod's rank in the order of waiting pods: capacity that is offered to a pod of a lower rank is
-- reserved for that
-- pod; the version up to which the caller has read the ledger, or false for a choice of kube-scheduler's, which
-- knows the anti-affinity of its pods; false, or each pod's required anti-affinity as `repelling` has it, or false;
-- false, or when each lease ends at the latest (Unix seconds), or false; and false, or of each pod what
-- `selected` reads of its rules about other pods.
-- Returns numbers, and values, in order. Per pod:
--   candidate (from 1), version, and a slot and a fence per share
--   0   the pod has a lease, which is the value
--   -1  no candidate fits; the value is a RefusalRecord
--   -2  it fits, but not all of its gang do
--   -3  the pod is gone
--   -4  its lease is too large; the value is why
local capacity = require('capacity')
local claims = require('claims')
local constants = require('constants')
local fair = require('fair')
local gone_pods = require('gone_pods')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local quota = require('quota')
local records = require('records')
local repelling = require('repelling')
local selected = require('selected')
local server = require('server')
local values = require('values')
local waiting = require('waiting')
local writes = require('writes')
local encode, unpack_limit = cmsgpack.pack, cmsgpack.unpack_limit
local find, substring, max = string.find, string.sub, math.max
local demand_at, record_at, resources_of = lease.demand_at, values.record_at, lease.resources_of
local node_of, device_of = records.node_of, records.device_of
local node_refusal, device_refusal = capacity.node_refusal, capacity.device_refusal
local index_lease, put_lease, next_version = capacity.index_lease, records.put_lease, ledger.next_version
local must_wait, add_demand = fair.must_wait, fair.add_demand
local add_to_node, add_to_device, set_slot = capacity.add_to_node, capacity.add_to_device, capacity.set_slot
local B, D, DEMAND, REQUEST = layouts.BOOKING, layouts.DEVICE, layouts.DEMAND, layouts.REQUEST
-- Each reservation reads these: a local takes less time than two look-ups.
local FENCE, NODE, SLOT_MAP, SLOTS = D.FENCE, DEMAND.NODE, D.SLOT_MAP, DEMAND.SLOTS
local MOST_GROUPS_BYTES, MOST_LEASE_BYTES = constants.MOST_GROUPS_BYTES, constants.MOST_LEASE_BYTES
local NUMBERS_BYTES, GRANT_BYTES = 80, 12 -- of the numbers of a lease at most, and of a slot and a fence

-- Of this call: arguments; whether the caller has not read of all pods whose anti-affinity is not reported yet; waiting
-- pods that come before others; and the reply.
local pods, counts, bounds, joined, known, new_lease
local is_behind, pending, is_gone, has_rules, numbers, answer, new_repelling
-- What was read of each pod: its first piece, its request, and its demand on the first candidate.
local first_pieces, requests, first_demands

-- The demand of the i-th pod on a candidate.
local function demand_on(i, candidate)
  if candidate == 1 then return first_demands[i] end
  return (demand_at(joined, bounds[first_pieces[i] + candidate - 1]))
end

-- The lease of the i-th pod on a candidate, without numbers.
local function packed_parts_on(i, candidate)
  local piece = first_pieces[i]
  local from, to = bounds[piece], bounds[piece + 1]
  if candidate == 1 then return substring(joined, from + 1, to) end
  local demand_begins = unpack_limit(joined, 1, from)
  local description_begins = unpack_limit(joined, 2, demand_begins) -- after the shares
  return substring(joined, from + 1, demand_begins)
    .. substring(joined, bounds[piece + candidate - 1] + 1, bounds[piece + candidate])
    .. substring(joined, description_begins + 1, to)
end

-- Read what the pods request, and fetch what they and their first candidates need. Returns {namespace -> the lowest
-- rank of its pods}.
local function read_pods(ranks)
  local first_nodes, first_devices, lowest_ranks = {}, {}, {}
  local piece = 1
  for i = 1, #pods do
    local request, demand_begins = record_at(joined, bounds[piece], REQUEST)
    first_pieces[i], requests[i] = piece, request
    local namespace = request[REQUEST.NAMESPACE]
    if not lowest_ranks[namespace] or lowest_ranks[namespace] < ranks[i] then
      lowest_ranks[namespace] = ranks[i]
    end
    if counts[i] > 0 then
      local demand = demand_at(joined, demand_begins)
      first_demands[i] = demand
      first_nodes[#first_nodes + 1] = demand[NODE]
      capacity.append_uuids(first_devices, demand)
    end
    piece = piece + max(1, counts[i])
  end
  records.fetch('leases', pods)
  records.fetch('nodes', first_nodes)
  records.fetch('devices', first_devices)
  return lowest_ranks
end

local function take_slot(device)
  local free = find(device[SLOT_MAP], '0', 1, true)
  local slot = free and free - 1 or #device[SLOT_MAP]
  if device[D.HELD] ~= '' then
    while capacity.is_slot_taken(device, slot) do slot = slot + 1 end
  end
  set_slot(device, slot, '1')
  return slot
end

local function raise_fence(device)
  device[FENCE] = device[FENCE] + 1
  return device[FENCE]
end

local function grants_for(demand)
  local grants, slots = {}, {}
  for booking, device in capacity.each_device(demand) do
    local of_device = {}
    slots[booking[B.DEVICE]] = of_device
    for s = 1, booking[B.SLOTS] do of_device[s] = take_slot(device) end
  end
  for uuid, device, _, _, number in capacity.each_share(demand, grants) do
    local slot = number > 0 and slots[uuid][number] or -1 - number
    if number < 0 then set_slot(device, slot, '1') end
    values.append(grants, slot, raise_fence(device))
  end
  return grants
end

local function add_refusal(reasons, i)
  numbers[#numbers + 1] = reasons.too_large and -4 or -1
  if reasons.too_large then
    answer[#answer + 1] = reasons.too_large
    return
  end
  local node_rows, device_rows = {}, {}
  for candidate = 1, counts[i] do
    local demand = demand_on(i, candidate)
    local node = node_of(demand[NODE])
    if node then node_rows[#node_rows + 1] = node end
    capacity.append_device_rows(device_rows, demand)
  end
  answer[#answer + 1] = encode({table.concat(reasons, '; '), device_rows, node_rows, reasons.excesses or {},
    reasons.reserved_for_other or false})
end

local function take_several(demand, resources, groups_text)
  local reason = capacity.demand_refusal(demand, resources, groups_text)
  if reason then return reason end
  capacity.add_demand(demand, resources, groups_text, 1)
  return nil, grants_for(demand)
end

-- Take a demand from its node and devices. One share without an instance is the usual case: as above, but without
-- intermediate tables.
local function take(demand, resources, groups_text)
  local name, booking, slots = demand[NODE], demand[DEMAND.BOOKINGS][1], demand[SLOTS]
  if #slots ~= 2 or slots[2] < 0 then return take_several(demand, resources, groups_text) end
  local node = node_of(name)
  local reason = node_refusal(node, resources)
  if reason then return reason end
  local device = device_of(booking[B.DEVICE])
  reason = device_refusal(device, name, groups_text, booking)
  if reason then return reason .. ' of ' .. booking[B.DEVICE] end
  add_to_node(node, resources, 1)
  add_to_device(device, 1, groups_text, booking)
  return nil, {slots[2] > 0 and take_slot(device) or -1, raise_fence(device)}
end

local function put_reservation(pod, request, demand, number, packed_parts, grants)
  local version, at = next_version(), #numbers + 2
  put_lease(pod, new_lease(version, grants, packed_parts))
  index_lease(pod, records.nodes[demand[NODE]], request[REQUEST.GANG])
  numbers[at - 1], numbers[at] = number, version
  for g = 1, #grants do numbers[at + g] = grants[g] end
  return version
end

local function too_large(what, size, most)
  return string.format('%s would have %d bytes, and the ledger stores at most %d', what, size, most)
end

-- Write a lease of the i-th pod for the first candidate that fits, and return the number of that; or nil, and why none
-- fits. Without a rank nothing is reserved for others.
local function reserve(i, rank, terms)
  local pod, request, count = pods[i], requests[i], counts[i]
  local groups_text, namespace = request[REQUEST.GROUPS], request[REQUEST.NAMESPACE]
  local resources, reasons = resources_of(request), nil
  if must_wait(namespace) then
    return nil, {'budget', excesses = {{'budget', '', 0, 0, 0, '', {}, 0}}}
  end
  if #groups_text > MOST_GROUPS_BYTES then
    return nil, {too_large = too_large('the anti-affinity groups', #groups_text, MOST_GROUPS_BYTES)}
  end
  local changed = has_rules and selected.refusal(i)
  for number = 1, count do
    local demand, packed_parts = demand_on(i, number), packed_parts_on(i, number)
    local name = demand[NODE]
    local reason, grants, excesses, charges
    local bytes = NUMBERS_BYTES + GRANT_BYTES * #demand[SLOTS] / 2 + #packed_parts
    if bytes > MOST_LEASE_BYTES then
      return nil, {too_large = too_large('the lease', bytes, MOST_LEASE_BYTES)}
    end
    if ledger.has_quotas then excesses, charges = quota.check(namespace, demand, request[REQUEST.LIMITED_RUN_S]) end
    if pending[1] and rank and waiting.is_reserved_for_other(pending, pod, namespace, rank, name) then
      reason = 'reserved-for-other'
    elseif is_behind and repelling.is_unknown(name, known) then
      reason = 'anti-affinity-unknown'
    elseif changed then
      reason = changed
    elseif terms and #repelling.terms_on(name) + #terms[2] > constants.MOST_REPELLING_BYTES then
      reason = too_large('the anti-affinity of pods that are being bound there',
        #repelling.terms_on(name) + #terms[2], constants.MOST_REPELLING_BYTES)
    elseif excesses then
      reason = 'quota'
    else
      reason, grants = take(demand, resources, groups_text)
    end
    if not reason then
      local version = put_reservation(pod, request, demand, number, packed_parts, grants)
      if terms then new_repelling[#new_repelling + 1] = {pod, version, name, unpack(terms)} end
      if charges then quota.charge(pod, namespace, charges) end
      add_demand(namespace, demand, 1)
      return number
    end
    reasons = reasons or {}
    reasons[#reasons + 1] = name .. ': ' .. reason
    if find(reason, 'record-size', 1, true) == 1 and count == 1 then
      reasons.too_large = 'the anti-affinity groups have no room in the record of a device: ' .. reasons[1]
    end
    if reason == 'quota' then
      reasons.excesses, reasons.namespace = reasons.excesses or {}, namespace
      values.append(reasons.excesses, unpack(excesses))
    end
    reasons.reserved_for_other = reasons.reserved_for_other or reason == 'reserved-for-other'
  end
  return nil, reasons or {'no candidate'}
end

-- Nothing that was counted above is written: return the totals as stored.
local function refuse_gang(leases_before, refused)
  for _, cache in ipairs({records.nodes, records.devices}) do
    for name in pairs(cache) do cache[name] = nil end
  end
  quota.discard()
  fair.added = {}
  numbers, answer = {}, {''}
  for i = 1, #pods do
    if is_gone[pods[i]] then
      numbers[#numbers + 1] = -3
    elseif leases_before[i] then
      numbers[#numbers + 1], answer[#answer + 1] = 0, leases_before[i].value
    elseif refused[i] then
      for _, excess in ipairs(refused[i].namespace and refused[i].excesses or {}) do
        quota.add_gang_part(refused[i].namespace, excess)
      end
      add_refusal(refused[i], i)
    else
      numbers[#numbers + 1] = -2
    end
  end
  answer[1] = encode(numbers)
  return answer
end

return function(now, expires_at, for_pods, candidate_counts, ends_of_pieces, gang_needs, ranks, read_version, repels,
    ends, rules_of_pods)
  pods, counts, bounds, joined, known = for_pods, candidate_counts, ends_of_pieces, server.tail, read_version
  new_lease = lease.reserving(now, expires_at)
  numbers, answer, new_repelling = {}, {''}, {}
  first_pieces, requests, first_demands = {}, {}, {}
  is_behind = known and ledger.repels_version and known < tonumber(ledger.repels_version)
  -- Pods of a gang that start together do not wait for each other.
  local gang = gang_needs and not gang_needs[3] and gang_needs[1] or nil
  pending = waiting.pending_offers(now, read_pods(ranks), gang)
  is_gone = gone_pods.among(pods)
  has_rules = rules_of_pods
  selected.begin(rules_of_pods, known)

  local leases_before, refused, reserved_pods = {}, {}, {}
  if gang_needs then
    local lease_count = waiting.gang_lease_count(gang_needs[1])
    if gang_needs[3] and lease_count < gang_needs[2]
      or gang_needs[4] >= 0 and lease_count ~= gang_needs[4] then
      for i = 1, #pods do leases_before[i] = records.leases[pods[i]] end
      return refuse_gang(leases_before, refused)
    end
    if gang_needs[3] then gang_needs = false end
  end
  local leases, unreadable, has_claims = records.leases, records.unreadable.leases, ledger.claim_count > 0
  for i = 1, #pods do
    local pod, number = pods[i], nil
    if is_gone[pod] then
      numbers[#numbers + 1] = -3
    elseif leases[pod] then
      leases_before[i] = leases[pod]
      numbers[#numbers + 1], answer[#answer + 1] = 0, leases[pod].value
    elseif unreadable[pod] then
      refused[i] = {'record-unreadable'}
      if not gang_needs then add_refusal(refused[i], i) end
    else
      local claim = has_claims and claims.suspend(pod)
      local reasons
      capacity.ends_by = ends and ends[i] or nil
      -- Capacity that a pod claims is reserved for no other pod, whatever its priority.
      number, reasons = reserve(i, not claim and ranks[i], repels and repels[i])
      if claim then claims.resume(pod, claim, number) end
      if number then
        reserved_pods[#reserved_pods + 1] = pod
      elseif gang_needs then
        refused[i] = reasons
      else
        add_refusal(reasons, i)
      end
    end
    if has_rules then selected.note(i, number == 1, number) end
  end
  if gang_needs
    and (next(refused) or next(is_gone)
      or waiting.gang_lease_count(gang_needs[1]) + #reserved_pods < gang_needs[2]) then
    return refuse_gang(leases_before, refused)
  end
  if #reserved_pods > 0 then
    records.expiring[expires_at] = reserved_pods
    waiting.remove_waiting(reserved_pods)
    claims.delete_ended()
    for _, pod in ipairs(new_repelling) do repelling.add(unpack(pod)) end
    selected.write()
    writes.write_changes('reserved')
  end
  answer[1] = encode(numbers)
  return answer
end
