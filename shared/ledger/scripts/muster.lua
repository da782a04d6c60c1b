-- Enrol pods of a gang among those that wait, and count it. Arguments: gang, how many of it run
-- together, rows of {pod, group, order, record, since, namespace}. A pod that waits already is left as it is.
-- Answers {live leases of the gang, pods of it that wait, rows as those of `waiting`}, and leases.
-- Rows: of all that wait, when the gang can begin. Leases: if one of the pods holds one, of all of the
-- gang that no kubelet was told of yet: the answer that named them may have been lost, and with it the
-- decision on the others, so that the rows are told, too.
local gang, least, rows = A[1], A[2], A[3]

local pods = {}
for i, row in ipairs(rows) do pods[i] = row[1] end
fetch('leases', pods)
local waiting, has_lease = records_of(pods), false
for i, row in ipairs(rows) do
  if leases[row[1]] then
    has_lease = true
  elseif not waiting[i] or decode(waiting[i])[6] ~= gang then
    put_waiting(row[1], row[2], row[3], capacity, row[4], row[5], gang, false, row[6])
  end
end

local live, here, told = held_by(gang), mustered(gang), {}
if live + here >= least and (live < least or has_lease) then
  local members = {}
  for _, entry in ipairs(call('ZRANGEBYLEX', P .. 'mustering', gang_range(gang))) do
    members[#members + 1] = string.match(entry, '([^|]*)$')
  end
  for _, value in ipairs(records_of(members)) do
    if value then
      local record = decode(value)
      told[#told + 1] = {record[3], record[4], record[5], record[1]}
    end
  end
end
local followed = {pack({live, here, told})}
if has_lease then
  local members = {}
  for _, entry in ipairs(call('ZRANGEBYLEX', P .. 'ganged', gang_range(gang))) do
    members[#members + 1] = string.match(entry, '([^|]*)$')
  end
  fetch('leases', members)
  for _, pod in ipairs(members) do
    local value = leases[pod]
    if value and opened(value)[L_STATE] ~= ACTIVE then followed[#followed + 1] = value end
  end
end
return followed
