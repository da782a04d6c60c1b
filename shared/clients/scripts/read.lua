-- Read leases. Arguments: {'pods', pods}, {'node', name} or {'scan', cursor, count}.
-- Answers: next cursor ('0': all seen), and per pod its lease or false.
local how, cursor, pods = A[1], '0', A[2]
if how == 'node' then
  pods = call('SMEMBERS', P .. 'on:' .. A[2])
elseif how == 'scan' then
  local found = call('ZSCAN', P .. 'leases', A[2], 'COUNT', A[3])
  cursor, pods = found[1], {}
  for i = 1, #found[2], 2 do pods[#pods + 1] = found[2][i] end
end
fetch('lease', pods)
local out = {}
for i, pod in ipairs(pods) do out[i] = leases[pod] end
return pack({cursor, out})
