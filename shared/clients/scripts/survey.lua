-- Read nodes. Arguments: names (none: only say which there are), and whether with their leases.
-- Answers: epoch, feed position, capacity number, names, rows of {name, node, facts, devices,
-- served, uuids, device states, leases, stray}.
local names, with_leases = A[1], A[2]
if #names == 0 then
  return pack({epoch, string.format('%.0f', feed), capacity, call('SMEMBERS', P .. 'nodes'), {}})
end

local function leases_on(name)
  local pods, found, stray = call('SMEMBERS', P .. 'on:' .. name), {}, {}
  fetch('lease', pods)
  for _, pod in ipairs(pods) do
    local lease = leases[pod]
    if not lease then
      stray[#stray + 1] = 'node ' .. name .. ' lists pod ' .. pod .. ', which has no lease'
    else
      found[#found + 1] = lease
      if lease[L_NODE] ~= name then stray[#stray + 1] = 'pod ' .. pod .. ' is on two nodes' end
    end
  end
  return found, stray
end

local rows = {}
fetch('node', names)
for _, name in ipairs(names) do
  if nodes[name] then
    local facts = call('HMGET', P .. 'facts:' .. name, 'facts', 'devices', 'served')
    local uuids, states, found, stray = uuids_on(name), {}, {}, {}
    fetch('device', uuids)
    for i, uuid in ipairs(uuids) do states[i] = devices[uuid] end
    if with_leases then found, stray = leases_on(name) end
    rows[#rows + 1] = {name, nodes[name], facts[1] or '', facts[2] or '[]', facts[3] or '[]',
      uuids, states, found, stray}
  end
end
return pack({epoch, string.format('%.0f', feed), capacity, names, rows})
