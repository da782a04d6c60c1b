-- Write leases that the cluster implies, with their slots and fences, unless they would over-commit
-- a device. Arguments: token ('' while ready), now, seconds the rebuild's lock is prolonged by, where
-- in ARGV[5] each lease begins and ends. Answers per lease: '' or why it was not written.
local token, now, lock_s, bounds = A[1], A[2], A[3], A[4]
if meta[1] ~= '1' then
  if call('HGET', P .. 'ledger', 'epoch') ~= token then return redis.error_reply('STALETOKEN') end
  call('HSET', P .. 'ledger', 'until', now + lock_s)
end

local function put_unknown_device(uuid, node)
  if not device_of(uuid) then
    new_device(uuid, node, 1, 0)
    local uuids = uuids_on(node)
    uuids[#uuids + 1] = uuid
    call('HSET', P .. 'facts:' .. node, 'uuids', pack(uuids))
  end
end

local function clash(takes, grants, tags)
  local last = takes[2]
  for h = TAKES, last, HOLD do
    local device = device_of(takes[h])
    if device then
      local told = device[D_MEMORY] > 0
      if told and device[D_USED] + takes[h + 1] > device[D_MEMORY] then return 'memory' end
      if device[D_CORES] + takes[h + 2] > 100 then return 'cores' end
      if takes[h + 5] == ALONE and device[D_SHARES] > 0 then return 'alone' end
      if device[D_ALONE] % 2 == 1 then return 'held-alone' end
      if device[D_CORES] >= 100 and takes[h + 5] ~= ANY then return 'held-alone' end
      if device[D_SHARES] > 0 and device[D_LAYOUT] ~= takes[h + 7] then return 'layout' end
      if has_tag(device, tags) then return 'tag' end
    end
  end
  for p = last + 1, #takes, 2 do
    local device = device_of(takes[TAKES + (takes[p] - 1) * HOLD])
    local slot = grants[p - last]
    if device and slot >= 0 and is_taken(device, slot) then return 'slot ' .. slot end
  end
end

local function restore(value, lease, takes, grants, pod)
  local last = takes[2]
  local node = node_of(takes[1]) or new_node(takes[1])
  for h = TAKES, last, HOLD do put_unknown_device(takes[h], takes[1]) end
  for p = last + 1, #takes, 2 do
    local device = devices[takes[TAKES + (takes[p] - 1) * HOLD]]
    local slot, fence = grants[p - last], grants[p - last + 1]
    if slot >= 0 then device[D_TAKEN] = with_slot(device[D_TAKEN], slot, '1') end
    device[D_FENCE] = math.max(device[D_FENCE], fence)
  end
  seq = math.max(seq, lease[L_VERSION])
  put_lease(pod, value)
  local tags, resources, _, gang, namespace = about(lease, value)
  fair.count(namespace, takes, 1)
  count(takes, resources, tags, 1)
  index_lease(pod, node, lease[L_EXPIRES], gang)
  if quota.on then quota.charge_lease(pod, lease, value) end
  if lease[L_STATE] ~= RESERVED then journal('restored', {pod, value}) end
end

local function meet(known, lease, takes, grants, pod)
  local value = known
  known = opened(value)
  if takes_of(known, value)[1] ~= takes[1] or grants_of(known, value)[2] ~= grants[2] then
    return 'the pod has another lease'
  end
  if lease[L_STATE] > known[L_STATE] then
    local was = known[L_STATE]
    known[L_STATE], known[L_EXPIRES] = lease[L_STATE], 0
    known[L_VERSION] = math.max(next_version(), lease[L_VERSION])
    seq = known[L_VERSION]
    value = put_changed(pod, known, value)
    if was == RESERVED then journal('held', {pod, value}) end
  end
  return ''
end

local out, restored = {}, {}
for i = 1, #bounds - 1 do
  local value = string.sub(ARGV[5], bounds[i] + 1, bounds[i + 1])
  local lease = opened(value)
  local takes, grants = takes_of(lease, value), grants_of(lease, value)
  local tags, _, pod = about(lease, value)
  local known = lease_of(pod)
  if known then
    out[i] = meet(known, lease, takes, grants, pod)
  else
    out[i] = clash(takes, grants, tags) or ''
    if out[i] == '' then
      restore(value, lease, takes, grants, pod)
      restored[#restored + 1] = pod
    end
  end
end
leave_waiting(restored)
if #written > 0 then flush('restored') end
return pack(out)
