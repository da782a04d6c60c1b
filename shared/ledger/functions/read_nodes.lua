-- Read nodes. Arguments: names (none: return only the names of all nodes); whether to return leases.
-- Returns a NodesRecord, and the leases.
local layouts = require('layouts')
local ledger = require('ledger')
local records = require('records')
local repelling = require('repelling')
local server = require('server')
local values = require('values')
local call, encode = redis.call, cmsgpack.pack
local N = layouts.NODE

local function add_leases(answer, broken, name)
  local pods, mismatches, count = records.pods_on_node(records.nodes[name]), {}, 0
  records.fetch('leases', pods)
  for _, pod in ipairs(pods) do
    local of_pod = records.leases[pod]
    if records.unreadable.leases[pod] then
      broken[#broken + 1] = {'leases', pod, name}
    elseif not of_pod then
      mismatches[#mismatches + 1] = 'node ' .. name .. ' lists pod ' .. pod .. ', which has no lease'
    else
      count = count + 1
      answer[#answer + 1] = of_pod.value
      if of_pod.demand[layouts.DEMAND.NODE] ~= name then
        mismatches[#mismatches + 1] = 'pod ' .. pod .. ' is on two nodes'
      end
    end
  end
  return count, mismatches
end

return function(names, with_leases)
  if #names == 0 then
    local all_names = call('HKEYS', server.prefix .. 'nodes')
    return {encode({ledger.generation, ledger.feed_entry, ledger.capacity, ledger.version, all_names, {}, {}})}
  end

  local answer, broken, rows = {''}, {}, {}
  records.fetch('nodes', names)
  for _, name in ipairs(names) do
    if records.nodes[name] then
      local stored = call('HMGET', server.prefix .. 'facts:' .. name, 'facts', 'devices', 'served')
      local uuids, states, count, mismatches = records.device_uuids(name), {}, 0, {}
      records.fetch('devices', uuids)
      if with_leases then count, mismatches = add_leases(answer, broken, name) end
      if records.nodes[name][N.STATUS] == 1 and not stored[1] then
        values.append(mismatches, 'node ' .. name .. ' has no facts')
      end
      for i, uuid in ipairs(uuids) do
        local device = records.devices[uuid]
        states[i] = device
        if records.unreadable.devices[uuid] then
          broken[#broken + 1] = {'devices', uuid, name}
        elseif not device then
          values.append(mismatches, 'node ' .. name .. ' lists device ' .. uuid .. ', which has no record')
        end
      end
      rows[#rows + 1] = {name, records.nodes[name], stored[1] or '', stored[2] or '[]',
        records.served_of(name, stored[3]), states, count, mismatches, repelling.terms_on(name)}
    elseif records.unreadable.nodes[name] then
      broken[#broken + 1] = {'nodes', name, name}
    end
  end
  answer[1] = encode({ledger.generation, ledger.feed_entry, ledger.capacity, ledger.version, names, rows, broken})
  return answer
end
