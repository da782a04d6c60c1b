-- Read nodes. Arguments: names (none: only say which there are), and whether with their leases.
-- Answers {epoch, feed position, capacity number, names, rows of {name, node, facts, devices,
-- served, uuids, device states, number of leases, stray}}, and the leases.
local names, with_leases = A[1], A[2]
if #names == 0 then
  return {pack({epoch, string.format('%.0f', feed), capacity, call('HKEYS', P .. 'nodes'), {}})}
end

local followed = {''}

local function leases_on(name)
  local pods, stray, found = pods_on(nodes[name]), {}, 0
  fetch('leases', pods)
  for _, pod in ipairs(pods) do
    local value = leases[pod]
    if not value then
      stray[#stray + 1] = 'node ' .. name .. ' lists pod ' .. pod .. ', which has no lease'
    else
      found = found + 1
      followed[#followed + 1] = value
      if takes_of(opened(value), value)[1] ~= name then
        stray[#stray + 1] = 'pod ' .. pod .. ' is on two nodes'
      end
    end
  end
  return found, stray
end

local rows = {}
fetch('nodes', names)
for _, name in ipairs(names) do
  if nodes[name] then
    local facts = call('HMGET', P .. 'facts:' .. name, 'facts', 'devices', 'served')
    local uuids, states, found, stray = uuids_on(name), {}, 0, {}
    fetch('devices', uuids)
    for i, uuid in ipairs(uuids) do states[i] = devices[uuid] and device_row(devices[uuid]) end
    if with_leases then found, stray = leases_on(name) end
    rows[#rows + 1] = {name, node_row(nodes[name]), facts[1] or '', facts[2] or '[]',
      told_served(name, facts[3]), uuids, states, found, stray}
  end
end
followed[1] = pack({epoch, string.format('%.0f', feed), capacity, names, rows})
return followed
