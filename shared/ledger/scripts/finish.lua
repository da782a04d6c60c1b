-- End leases and give back what they hold. Arguments: 'released' or 'expired'; for the former the
-- pods, the version read or false, the reason; for the latter now and how many groups at most.
-- Answers whether there may be more, and the leases that ended.
local to = A[1]
local pods, cause, batches = A[2], to, {}
if to == 'expired' then
  batches = call('ZRANGEBYSCORE', P .. 'due', '-inf', A[2], 'LIMIT', 0, A[3])
  pods = {}
  for _, batch in ipairs(batches) do
    for _, pod in ipairs(decode(batch)[2]) do pods[#pods + 1] = pod end
  end
else
  cause = to .. ': ' .. A[4]
end

local function is_meant(lease)
  if to == 'expired' then return lease[L_STATE] == RESERVED and lease[L_EXPIRES] <= A[2] end
  return not A[3] or lease[L_VERSION] == A[3]
end

local meant, taken, ending, names, uuids = {}, {}, {}, {}, {}
fetch('leases', pods)
for _, pod in ipairs(pods) do
  local value = leases[pod]
  local lease = value and opened(value)
  if lease and not meant[pod] and is_meant(lease) then
    local takes = takes_of(lease, value)
    meant[pod], taken[pod] = lease, takes
    ending[#ending + 1] = pod
    names[#names + 1] = takes[1]
    for h = TAKES, takes[2], HOLD do uuids[#uuids + 1] = takes[h] end
  end
end
fetch('nodes', names)
fetch('devices', uuids)

local leaving = {}

local function give_back(pod, lease, takes, value)
  local grants, last, g = grants_of(lease, value), takes[2], 1
  local tags, resources, _, gang, namespace = about(lease, value)
  fair.count(namespace, takes, -1)
  if gang ~= '' then leaving[#leaving + 1] = gang .. '|' .. pod end
  count(takes, resources, tags, -1)
  for p = last + 1, #takes, 2 do
    local device = devices[takes[TAKES + (takes[p] - 1) * HOLD]]
    if grants[g] >= 0 then device[D_TAKEN] = with_slot(device[D_TAKEN], grants[g], '0') end
    g = g + 2
  end
  for h = TAKES, last, HOLD do
    local device = devices[takes[h]]
    device[D_TAKEN] = string.gsub(device[D_TAKEN], '0+$', '')
  end
  free_on(takes[1])
  if quota.on then quota.release(pod) end
  lease[L_STATE], lease[L_VERSION] = to == 'expired' and EXPIRED or RELEASED, next_version()
  leases[pod] = false
  return packed(LEASE, unpack(lease, 1, L_LENGTH)) .. string.sub(value, LEASE_BYTES + 1)
end

local followed, ended = {pack(to == 'expired' and #batches == A[3])}, {}
for _, pod in ipairs(ending) do
  local was = meant[pod][L_STATE]
  local value = give_back(pod, meant[pod], taken[pod], leases[pod])
  followed[#followed + 1] = value
  if was ~= RESERVED then
    ended[#ended + 1] = pod
    ended[#ended + 1] = value
  end
end
if #ending > 0 then
  write('HDEL', 'leases', ending)
  write('ZREM', 'on', ending)
  write('ZREM', 'ganged', leaving)
  drop_gone()
  keep_freed(names)
  flush(cause)
end
journal('ended', ended)
if #batches > 0 then call('ZREM', P .. 'due', unpack(batches)) end
return followed
