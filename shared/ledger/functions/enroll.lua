-- Add pods of a gang to the waiting pods, and count the gang. Arguments: gang; its minimum; rows as those of
-- wait.lua; whether one of the pods was queued again; whether the nodes of its leases are wanted. A pod that waits
-- already is not changed.
-- Returns {live leases of the gang, pods of it that wait, waiting pods, pods that are gone, nodes}, and leases.
-- The rows are all its waiting pods once the gang is complete, or if a pod was queued again. If one of the
-- pods has a lease, the leases are those of these pods, and those of the gang that are not active yet, and
-- the rows are included: an earlier reply, and with it the decision about the other pods, may have been lost.
local constants = require('constants')
local gone_pods = require('gone_pods')
local layouts = require('layouts')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local waiting = require('waiting')
local encode = cmsgpack.pack
local W = layouts.WAITING

-- The nodes on which pods of the gang hold leases.
local function nodes_of(gang)
  local members, names, is_known = waiting.gang_pods('gang-leases', gang), {}, {}
  records.fetch('leases', members)
  for _, pod in ipairs(members) do
    local name = records.leases[pod] and records.leases[pod].demand[layouts.DEMAND.NODE]
    if name and not is_known[name] then
      is_known[name] = true
      names[#names + 1] = name
    end
  end
  return names
end

return function(gang, min_members, rows, is_requeued, with_nodes)
  local pods = records.fetch_leases_of(rows)
  local stored, has_lease, has_new = server.call_all('HMGET', 'waiting', pods), {}, false
  local gone, is_gone = {}, gone_pods.among(pods)
  for i, row in ipairs(rows) do
    local pod, group, order, _, record, since, _, _, _, namespace = unpack(row)
    if is_gone[pod] then
      gone[#gone + 1] = pod
    elseif records.leases[pod] then
      has_lease[pod] = true
    elseif (waiting.waiting_of(stored[i]) or {})[W.GANG] ~= gang then
      waiting.put_waiting(pod, group, order, ledger.capacity, record, since, gang, false, namespace)
      has_new = true
    end
  end

  local live_count, waiting_count, waiting_rows = waiting.gang_lease_count(gang), waiting.gang_waiting_count(gang), {}
  local is_complete = live_count + waiting_count >= min_members and (live_count < min_members or next(has_lease))
  -- The verdicts of the others name the number of pods, too.
  if has_new and not is_complete and waiting_count > #rows then waiting.mark_gang_changed(gang) end
  if is_complete or is_requeued then
    for _, value in ipairs(server.call_all('HMGET', 'waiting', waiting.gang_pods('gang-waiting', gang))) do
      waiting_rows[#waiting_rows + 1] = waiting.waiting_of(value)
    end
  end
  local nodes = with_nodes and nodes_of(gang) or {}
  local answer = {encode({live_count, waiting_count, waiting_rows, gone, nodes})}
  if next(has_lease) then
    local members = waiting.gang_pods('gang-leases', gang)
    records.fetch('leases', members)
    for _, pod in ipairs(members) do
      local of_pod = records.leases[pod]
      if of_pod and (has_lease[pod] or of_pod.numbers[layouts.NUMBERS.STATE] ~= constants.ACTIVE) then
        answer[#answer + 1] = of_pod.value
        has_lease[pod] = nil
      end
    end
    for pod in pairs(has_lease) do answer[#answer + 1] = records.leases[pod].value end
  end
  return answer
end
