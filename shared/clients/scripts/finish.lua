-- End leases and give back what they hold. Arguments: 'released' or 'expired'; for the former the
-- pods, the version read or false, the reason; for the latter now and how many groups at most.
-- Answers the leases that ended, and whether there may be more.
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
fetch('lease', pods)
local takes_of = {}

local function give_back(pod, lease)
  local takes, grants = takes_of[pod], lease[L_GRANTS]
  local last, g = takes[2], 1
  count(takes, parse(lease[L_RESOURCES]), lease[L_TAG], -1)
  for p = last + 1, #takes, 2 do
    local device = devices[takes[TAKES + (takes[p] - 1) * HOLD]]
    if grants[g] >= 0 then device[D_TAKEN] = with_slot(device[D_TAKEN], grants[g], '0') end
    g = g + 2
  end
  for h = TAKES, last, HOLD do
    local device = devices[takes[h]]
    device[D_TAKEN] = string.gsub(device[D_TAKEN], '0+$', '')
  end
  free_on(lease[L_NODE])
  lease[L_STATE], lease[L_VERSION] = to, next_version()
  call('DEL', P .. 'lease:' .. pod)
  call('SREM', P .. 'on:' .. lease[L_NODE], pod)
  leases[pod] = false
end

local function is_meant(lease)
  if not lease then return false end
  if to == 'expired' then return lease[L_STATE] == 'reserved' and lease[L_EXPIRES] <= A[2] end
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
    for h = TAKES, takes[2], HOLD do uuids[#uuids + 1] = takes[h] end
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
if #batches > 0 then call('ZREM', P .. 'due', unpack(batches)) end
return pack({out, to == 'expired' and #batches == A[3]})
