-- Load leases. Arguments: pods; nodes; gangs. Returns each pod's lease or '', then all leases of the nodes,
-- then those of the gangs of which no pod is bound.
local records = require('records')
local waiting = require('waiting')

return function(pods, names, gangs)
  records.fetch('nodes', names)
  for _, name in ipairs(names) do
    if records.nodes[name] then
      for _, pod in ipairs(records.pods_on_node(records.nodes[name])) do pods[#pods + 1] = pod end
    end
  end
  for _, gang in ipairs(gangs) do
    for _, pod in ipairs(waiting.reserved_gang(gang)) do pods[#pods + 1] = pod end
  end
  records.fetch('leases', pods)
  local answer = {}
  for i, pod in ipairs(pods) do
    local of_pod = records.leases[pod]
    answer[i] = of_pod and of_pod.value or ''
  end
  return answer
end
