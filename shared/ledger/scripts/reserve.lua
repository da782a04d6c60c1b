-- Reserve for a group of pods. Arguments: now, expires_at, pods, number of candidates of each, and
-- where in ARGV[5] each piece begins and ends: per pod what its lease will say of it whatever it
-- takes, then what each candidate takes (see L_*).
-- Then {gang, how many of it must hold leases after this} for all or nothing, or false; and each
-- pod's rank, as in the order of those that wait: what is being offered to one before it is 'kept'.
-- Answers numbers, and what they point to. Per pod: candidate (from 1), version, and per share slot
-- and fence; or 0 for a pod that has a lease, which follows; or -1 if nothing fits: {reason, nodes,
-- devices, what quotas are in the way} follows; or -2 if it fits, but not all of its gang do.
local LEASE_OF_ONE = LEASE .. GRANT
local now, expires_at, pods, counts, bounds, joined = A[1], A[2], A[3], A[4], A[5], ARGV[5]
local together, ranks = A[6], A[7]
local first_nodes, first_devices, asking = {}, {}, {}
local piece = 1
for i = 1, #pods do
  local _, _, _, _, _, namespace = pieces(joined, 5, bounds[piece] + 1)
  ranks[i] = string.format('%010.0f', ranks[i])
  if not asking[namespace] or asking[namespace] < ranks[i] then asking[namespace] = ranks[i] end
  if counts[i] > 0 then
    local _, node, uuid, takes = pieces(joined, 3, bounds[piece + 1] + 1)
    first_nodes[#first_nodes + 1] = node
    if uuid then
      first_devices[#first_devices + 1] = uuid
    else
      for h = TAKES, takes[2], HOLD do first_devices[#first_devices + 1] = takes[h] end
    end
  end
  piece = piece + 1 + counts[i]
end
fetch('leases', pods)
fetch('nodes', first_nodes)
fetch('devices', first_devices)
local guards = fair.guards_at(now, asking)

local function take_slot(device)
  local slot = lowest_slot(device[D_TAKEN])
  device[D_TAKEN] = with_slot(device[D_TAKEN], slot, '1')
  return slot
end

local function raise_fence(device)
  device[D_FENCE] = device[D_FENCE] + 1
  return device[D_FENCE]
end

local function grants_for(takes)
  local last = takes[2]
  local grants, slots = {}, {}
  for h = TAKES, last, HOLD do
    local device, given = devices[takes[h]], {}
    for s = 1, takes[h + 4] do given[s] = take_slot(device) end
    slots[#slots + 1] = given
  end
  for p = last + 1, #takes, 2 do
    local hold, place = takes[p], takes[p + 1]
    local device, slot = devices[takes[TAKES + (hold - 1) * HOLD]], -1
    if place > 0 then
      slot = slots[hold][place]
    elseif place < 0 then
      slot = -1 - place
      device[D_TAKEN] = with_slot(device[D_TAKEN], slot, '1')
    end
    grants[#grants + 1] = slot
    grants[#grants + 1] = raise_fence(device)
  end
  return grants
end

local out, followed, reserved = {}, {''}, {}

local function full(reasons, first, last)
  local told_nodes, told_devices = {}, {}
  for p = first, last do
    local takes = takes_at(joined, bounds[p])
    local node = node_of(takes[1])
    if node then told_nodes[#told_nodes + 1] = node_row(node) end
    for h = TAKES, takes[2], HOLD do
      local device = device_of(takes[h])
      if device then told_devices[#told_devices + 1] = device_row(device) end
    end
  end
  out[#out + 1] = -1
  followed[#followed + 1] =
    pack({table.concat(reasons, '; '), told_nodes, told_devices, reasons.quotas or {}})
end

-- One share, as nearly always: the same as below, without tables in between.
local function take_one(name, uuid, memory, cores, slotted, slots, company, resources, tags)
  local node = node_of(name)
  local why = node_refusal(node, resources)
  if why then return why end
  local device = device_of(uuid)
  why = device_refusal(device, name, memory, cores, 1, slotted, company, slots, '', tags)
  if why then return why .. ' of ' .. uuid end
  count_on_node(node, resources, 1)
  count_on_device(device, memory, cores, 1, company, '', tags, 1)
  return nil, {slotted and take_slot(device) or -1, raise_fence(device)}
end

local function take_several(takes, resources, tags)
  local why = refusal(takes, resources, tags)
  if why then return why end
  count(takes, resources, tags, 1)
  return nil, grants_for(takes)
end

local function grant(pod, gang, name, number, said, takes, length, grants)
  local version, shares, at = next_version(), #grants / 2, #out + 2
  local format = shares == 1 and LEASE_OF_ONE or LEASE .. string.rep(GRANT, shares)
  put_lease(pod, packed(format, RESERVED, version, version, now, expires_at, shares, length,
    unpack(grants)) .. said .. takes)
  index_lease(pod, nodes[name], expires_at, gang)
  out[at - 1], out[at] = number, version
  for g = 1, #grants do out[at + g] = grants[g] end
end

-- Write a lease for the first of the pieces `first` to `last` that fits; what it says besides is in
-- the piece before them. Without a rank nothing is kept from it. Answers nothing, or why none does.
local function reserve(pod, rank, first, last)
  local from, to = bounds[first - 1], bounds[first]
  local _, tags, text, _, gang, namespace = pieces(joined, 5, from + 1)
  local resources, reasons = resources_in(text), nil
  if fair.is_held(namespace) then
    reasons = {'budget'}
    reasons.quotas = {{'budget', '', 0, 0, 0, '', {}}}
    return reasons
  end
  for p = first, last do
    local name, uuid, memory, cores, slotted, slots, company, why, grants
    local excess, rows
    _, name, uuid, memory, cores, slotted, slots, company = pieces(joined, 7, bounds[p] + 1)
    if quota.on then excess, rows = quota.weigh(namespace, takes_at(joined, bounds[p])) end
    if guards[1] and rank and fair.is_kept(guards, pod, namespace, rank, name) then
      why = 'kept'
    elseif excess then
      why = 'quota'
    elseif uuid then
      why, grants = take_one(name, uuid, memory, cores, slotted, slots, company, resources, tags)
    else
      why, grants = take_several(memory, resources, tags)
    end
    if not why then
      local said, takes = string.sub(joined, from + 1, p == first and bounds[p + 1] or to), ''
      if p > first then takes = string.sub(joined, bounds[p] + 1, bounds[p + 1]) end
      grant(pod, gang, name, p - first + 1, said, takes, to - from, grants)
      if rows then quota.charge(pod, namespace, rows) end
      if uuid then
        fair.add(namespace, company == ALONE and 100 or cores, memory)
      else
        fair.count(namespace, memory, 1)
      end
      return nil
    end
    reasons = reasons or {}
    reasons[#reasons + 1] = name .. ': ' .. why
    if why == 'quota' then
      reasons.quotas = reasons.quotas or {}
      reasons.quotas[#reasons.quotas + 1] = excess
    end
  end
  return reasons or {'no candidate'}
end

local function held(value)
  out[#out + 1] = 0
  followed[#followed + 1] = value
end

-- Nothing of what was counted above is written: tell the totals as they are stored.
local function withhold(held_before, refused)
  for _, cache in ipairs({nodes, devices}) do
    for name in pairs(cache) do cache[name] = nil end
  end
  quota.forget()
  fair.added = {}
  out, followed = {}, {''}
  local at = 1
  for i = 1, #pods do
    if held_before[i] then
      held(held_before[i])
    elseif refused[i] then
      full(refused[i], at + 1, at + counts[i])
    else
      out[#out + 1] = -2
    end
    at = at + 1 + counts[i]
  end
  followed[1] = pack(out)
  return followed
end

local held_before, refused = {}, {}
piece = 1
for i = 1, #pods do
  local pod = pods[i]
  if leases[pod] then
    held_before[i] = leases[pod]
    held(leases[pod])
  else
    local claim = lift_claim(pod)
    -- What was freed for a pod that claims it is kept for nobody else, whatever his priority.
    local reasons = reserve(pod, not claim and ranks[i], piece + 1, piece + counts[i])
    if claim then settle_claim(pod, claim, not reasons) end
    if not reasons then
      reserved[#reserved + 1] = pod
    elseif together then
      refused[i] = reasons
    else
      full(reasons, piece + 1, piece + counts[i])
    end
  end
  piece = piece + 1 + counts[i]
end
if together and (next(refused) or held_by(together[1]) + #reserved < together[2]) then
  return withhold(held_before, refused)
end
if #reserved > 0 then
  leave_waiting(reserved)
  end_claims()
  flush('reserved')
end
followed[1] = pack(out)
return followed
