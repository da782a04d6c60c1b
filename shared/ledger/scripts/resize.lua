-- Change how much of its devices a running lease holds. Arguments, by the first of them:
--   'turn', pod, token, ms     from now on, and for so long, only the bearer of the token may make
--                              this pod's lease smaller; answers whether nobody else may
--   'leave', pod, token        that is over
--   'resize', pod, version read, token or ''
--                              ARGV[5] is the lease with its new shares. Answers {'resized'} and the
--                              lease; or {'stale', the stored version, 0 without a lease}, {'turn'}
--                              if the token's time is over, {'full', reason, devices, what quotas are
--                              in the way}; then nothing has changed
--   'unsettled', ms, most      answers the pods of leases that were resized longer ago than that, and
--                              whose node and annotations are not known to have followed
--   'settled', pod, version    they have, unless the lease was resized again
--   'unsettle', rows of {pod, version}
--                              they may not have
--
--   turn:POD   the token of who may make the lease smaller, for a moment
--   unsettled  hash  pod -> {version of its lease, instant in ms}
local UNSETTLED = P .. 'unsettled'
local time = call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function turn_of(pod) return P .. 'turn:' .. pod end

-- Why a device cannot give so much more, or nil.
local function growth_refusal(device, name, memory, cores)
  if memory <= 0 and cores <= 0 then return nil end
  if not device then return 'device-unknown' end
  if device[D_NODE] ~= name then return 'device-moved' end
  if device[D_OK] ~= 1 then
    return device[D_OK] == 2 and 'device-closed' or 'device-unhealthy'
  end
  if device[D_ALONE] >= CLAIMED then return 'claimed' end
  if memory > 0 and device[D_USED] + memory > device[D_MEMORY] then return 'memory' end
  if cores > 0 and device[D_CORES] + cores > 100 then return 'cores' end
end

local function refused(why, takes, excess)
  local told = {}
  for h = TAKES, takes[2], HOLD do
    local device = device_of(takes[h])
    if device then told[#told + 1] = device_row(device) end
  end
  return {pack({'full', why, told, excess and {excess} or {}})}
end

-- The lease with its new shares, as it is to be stored: its numbers are those of the stored one, and
-- the last that it says is when it was resized, later than the time before.
local function changed(lease, value)
  local to = opened(value)
  for _, at in ipairs({L_STATE, L_ORIGIN, L_CREATED, L_EXPIRES}) do to[at] = lease[at] end
  to[L_VERSION] = next_version()
  local ends = LEASE_BYTES + GRANT_BYTES * to[L_COUNT] + to[L_LENGTH]
  local before = unpacked('>d', value, ends - 7)
  local at = math.max(now_ms, math.floor(before * 1000 + 0.5) + 1) / 1000
  return packed(LEASE, unpack(to, 1, L_LENGTH)) .. string.sub(value, LEASE_BYTES + 1, ends - 8)
    .. packed('>d', at) .. string.sub(value, ends + 1), to[L_VERSION]
end

local function resize(pod, version, token)
  local value = lease_of(pod)
  local lease = value and opened(value)
  if not lease or lease[L_VERSION] ~= version then
    return {pack({'stale', lease and lease[L_VERSION] or 0})}
  end
  if token ~= '' and call('GET', turn_of(pod)) ~= token then return {pack({'turn'})} end

  local before, after = takes_of(lease, value), takes_of(opened(ARGV[5]), ARGV[5])
  local name, is_smaller, more = before[1], false, {}
  for h = TAKES, before[2], HOLD do
    local memory, cores = after[h + 1] - before[h + 1], after[h + 2] - before[h + 2]
    local why = growth_refusal(device_of(before[h]), name, memory, cores)
    if why then return refused(why .. ' of ' .. before[h], before) end
    more[h] = {memory, cores}
    is_smaller = is_smaller or memory < 0 or cores < 0
  end
  local _, _, _, _, _, namespace =
    pieces(value, 5, LEASE_BYTES + GRANT_BYTES * lease[L_COUNT] + 1)
  if quota.on then
    local excess = quota.recharge(pod, namespace, after, is_smaller)
    if excess then return refused('quota', before, excess) end
  end
  for h, amounts in pairs(more) do
    local device = device_of(before[h])
    if device then count_on_device(device, amounts[1], amounts[2], 0, 0, '', '', 1) end
  end
  fair.count(namespace, before, -1)
  fair.count(namespace, after, 1)
  fetch('nodes', {name})
  if is_smaller then free_on(name) end
  touch_node(name)
  local new, number = changed(lease, ARGV[5])
  put_lease(pod, new)
  flush('resized')
  call('HSET', UNSETTLED, pod, pack({number, now_ms}))
  if token ~= '' then call('DEL', turn_of(pod)) end
  journal('ended', {pod, value})
  journal('held', {pod, new})
  return {pack({'resized'}), new}
end

local function unsettled(older_ms, most)
  local pods, found = {}, call('HGETALL', UNSETTLED)
  for i = 1, #found, 2 do
    if #pods < most and decode(found[i + 1])[2] <= now_ms - older_ms then
      pods[#pods + 1] = found[i]
    end
  end
  return {pack(pods)}
end

local function settled(pod, version)
  local value = call('HGET', UNSETTLED, pod)
  local is_this = value and decode(value)[1] <= version
  if is_this then call('HDEL', UNSETTLED, pod) end
  return {pack(is_this and true or false)}
end

local what = A[1]
if what == 'turn' then
  return {pack(call('SET', turn_of(A[2]), A[3], 'NX', 'PX', A[4]) and true or false)}
end
if what == 'leave' then
  local is_ours = call('GET', turn_of(A[2])) == A[3]
  if is_ours then call('DEL', turn_of(A[2])) end
  return {pack(is_ours)}
end
if what == 'resize' then return resize(A[2], A[3], A[4]) end
if what == 'unsettled' then return unsettled(A[2], A[3]) end
if what == 'settled' then return settled(A[2], A[3]) end
for _, row in ipairs(A[2]) do call('HSET', UNSETTLED, row[1], pack({row[2], 0})) end
return {pack(true)}
