-- Read leases. Arguments: pods, or nodes. Answers per pod its lease or '', or all of the nodes'.
local pods = A[1]
fetch('nodes', A[2])
for _, name in ipairs(A[2]) do
  if nodes[name] then
    for _, pod in ipairs(pods_on(nodes[name])) do pods[#pods + 1] = pod end
  end
end
fetch('leases', pods)
local out = {}
for i, pod in ipairs(pods) do out[i] = leases[pod] or '' end
return out
