-- Enroll pods of a gang among those that wait, and count the gang. Arguments: gang; how many of it run
-- together; rows of {pod, group, order, record, since, namespace}. A pod that waits already is left as it
-- is.
-- Answers {live leases of the gang, pods of it that wait, rows as those of list_waiting.lua}, and leases.
-- The rows are those of all that wait, once the gang can begin. If one of the pods holds a lease, the
-- leases are those of the gang that are not active yet: the answer that named them may have been lost,
-- and with it the decision about the others, so that the rows are there, too.
local gang, min_members, rows = ARGS[1], ARGS[2], ARGS[3]

local pods = {}
for i, row in ipairs(rows) do pods[i] = row[1] end
fetch('leases', pods)
local waiting, has_lease = waiting_records(pods), false
for i, row in ipairs(rows) do
  local pod, group, order, record, since, namespace = unpack(row)
  if leases[pod] then
    has_lease = true
  elseif not waiting[i] or decode(waiting[i])[W.GANG] ~= gang then
    put_waiting(pod, group, order, capacity, record, since, gang, false, namespace)
  end
end

local live_count, waiting_count, waiting_rows = gang_lease_count(gang), gang_waiting_count(gang), {}
if live_count + waiting_count >= min_members and (live_count < min_members or has_lease) then
  for _, value in ipairs(waiting_records(gang_pods('gang-waiting', gang))) do
    if value then waiting_rows[#waiting_rows + 1] = waiting_row(value) end
  end
end
local answer = {encode({live_count, waiting_count, waiting_rows})}
if has_lease then
  local members = gang_pods('gang-leases', gang)
  fetch('leases', members)
  for _, pod in ipairs(members) do
    local value = leases[pod]
    if value and header_of(value)[L_STATE] ~= ACTIVE then answer[#answer + 1] = value end
  end
end
return answer
