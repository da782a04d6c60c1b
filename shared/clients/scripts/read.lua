-- Read leases. Arguments: pods, or nodes. Answers per pod its lease or false, or all of the nodes'.
local pods = A[1]
for _, node in ipairs(A[2]) do
  for _, pod in ipairs(call('SMEMBERS', P .. 'on:' .. node)) do pods[#pods + 1] = pod end
end
fetch('lease', pods)
local out = {}
for i, pod in ipairs(pods) do out[i] = leases[pod] end
return pack(out)
