-- Read nodes. Arguments: names (none: return only the names of all nodes); whether to return leases.
-- Returns {generation, ID of the last feed entry, capacity number, highest version, names, rows of {name, node, facts,
-- devices, served resources, uuids, device states, number of leases, mismatches, terms of `repelling` pods}, and kind, key and
-- node ('': not known) of each record that cannot be read}, and the leases.
local names, with_leases = ARGS[1], ARGS[2]
if #names == 0 then
  return {encode({generation, last_entry, capacity, last_version, call('HKEYS', PREFIX .. 'nodes'), {}, {}})}
end

local answer, broken = {''}, {}

local function add_leases(name)
  local pods, mismatches, count = pods_on_node(nodes[name]), {}, 0
  fetch('leases', pods)
  for _, pod in ipairs(pods) do
    local value = leases[pod]
    if unreadable.leases[pod] then
      append(broken, 'leases', pod, '')
    elseif not value then
      mismatches[#mismatches + 1] = 'node ' .. name .. ' lists pod ' .. pod .. ', which has no lease'
    else
      count = count + 1
      answer[#answer + 1] = value
      if demand_of(header_of(value), value)[1] ~= name then
        mismatches[#mismatches + 1] = 'pod ' .. pod .. ' is on two nodes'
      end
    end
  end
  return count, mismatches
end

local rows = {}
fetch('nodes', names)
for _, name in ipairs(names) do
  if nodes[name] then
    local stored = call('HMGET', PREFIX .. 'facts:' .. name, 'facts', 'devices', 'served')
    local uuids, states, count, mismatches = device_uuids(name), {}, 0, {}
    fetch('devices', uuids)
    if with_leases then count, mismatches = add_leases(name) end
    if nodes[name][N_STATUS] == 1 and not stored[1] then append(mismatches, 'node ' .. name .. ' has no facts') end
    for i, uuid in ipairs(uuids) do
      states[i] = devices[uuid] and device_row(devices[uuid])
      if unreadable.devices[uuid] then
        append(broken, 'devices', uuid, name)
      elseif not devices[uuid] then
        append(mismatches, 'node ' .. name .. ' lists device ' .. uuid .. ', which has no record')
      end
    end
    rows[#rows + 1] = {name, node_row(nodes[name]), stored[1] or '', stored[2] or '[]',
      served_of(name, stored[3]), uuids, states, count, mismatches, repelling.terms_on(name)}
  elseif unreadable.nodes[name] then
    append(broken, 'nodes', name, name)
  end
end
answer[1] = encode({generation, last_entry, capacity, last_version, names, rows, broken})
return answer
