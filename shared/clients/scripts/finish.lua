-- End leases and give back what they hold. Arguments: 'released' or 'expired'; for the former the
-- pods, the version read or false, the reason; for the latter now and how many at most.
-- Answers the leases that ended, and whether there may be more.
local to = A[1]
local pods, cause = A[2], to
if to == 'expired' then
  pods = call('ZRANGEBYSCORE', P .. 'leases', '-inf', A[2], 'LIMIT', 0, A[3])
else
  cause = to .. ': ' .. A[4]
end
fetch('lease', pods)
local takes_of = {}

local function give_back(pod, lease)
  local holds, places, grants = takes_of[pod][2], takes_of[pod][3], lease[L_GRANTS]
  count(lease[L_NODE], parse(lease[L_RESOURCES]), holds, lease[L_TAG], -1)
  for p = 1, #places, 2 do
    local device = devices[holds[(places[p] - 1) * HOLD + 1]]
    if grants[p] >= 0 then device[D_TAKEN] = with_slot(device[D_TAKEN], grants[p], '0') end
  end
  for h = 1, #holds, HOLD do
    local device = devices[holds[h]]
    device[D_TAKEN] = string.gsub(device[D_TAKEN], '0+$', '')
  end
  free_on(lease[L_NODE])
  lease[L_STATE], lease[L_VERSION] = to, next_version()
  call('DEL', P .. 'lease:' .. pod)
  call('ZREM', P .. 'leases', pod)
  call('SREM', P .. 'on:' .. lease[L_NODE], pod)
  leases[pod] = false
end

local function is_meant(lease)
  if not lease then return false end
  if to == 'expired' then return lease[L_STATE] == 'reserved' end
  return not A[3] or lease[L_VERSION] == A[3]
end

local out = {}
local names, uuids = {}, {}
for _, pod in ipairs(pods) do
  local lease = leases[pod]
  if lease then
    local takes = parse(lease[L_TAKES])
    takes_of[pod] = takes
    names[#names + 1] = lease[L_NODE]
    for h = 1, #takes[2], HOLD do uuids[#uuids + 1] = takes[2][h] end
  end
end
fetch('node', names)
fetch('device', uuids)
for _, pod in ipairs(pods) do
  local lease = leases[pod]
  if is_meant(lease) then
    give_back(pod, lease)
    out[#out + 1] = lease
  end
end
if #out > 0 then
  drop_gone()
  flush(cause)
end
return pack({out, to == 'expired' and #pods == A[3]})
