-- Load leases. Arguments: pods; nodes; gangs. Returns each pod's lease or '', then all leases of the nodes,
-- then those of the gangs of which no pod is bound.
local pods = ARGS[1]
fetch('nodes', ARGS[2])
for _, name in ipairs(ARGS[2]) do
  if nodes[name] then
    for _, pod in ipairs(pods_on_node(nodes[name])) do pods[#pods + 1] = pod end
  end
end
for _, gang in ipairs(ARGS[3]) do
  for _, pod in ipairs(reserved_gang(gang)) do pods[#pods + 1] = pod end
end
fetch('leases', pods)
local answer = {}
for i, pod in ipairs(pods) do answer[i] = leases[pod] or '' end
return answer
