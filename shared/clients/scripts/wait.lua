-- Remember pods that fit nowhere, or forget them. Arguments: {'forget', pods} or {'wait', rows of
-- {pod, group ('' if no freed capacity can help), order, capacity number decided on, record, since}}.
-- Answers the pods for which what was freed since the decision may be enough: decide again; and
-- those that hold a lease and need not wait.
if A[1] == 'forget' then
  leave_waiting(A[2])
  return pack({{}, {}})
end

local LOOK_AT = 64

local function is_stale(group, decided_on)
  if group == '' or decided_on >= capacity then return false end
  local names =
    call('ZRANGEBYSCORE', P .. 'freed', '(' .. string.format('%.0f', decided_on), '+inf',
      'LIMIT', 0, LOOK_AT + 1)
  if #names > LOOK_AT then return true end
  for _, name in ipairs(names) do
    if room_for(group, name) > 0 then return true end
  end
  return false
end

local pods = {}
for i, row in ipairs(A[2]) do pods[i] = row[1] end
fetch('leases', pods)

local stale, held = {}, {}
for _, row in ipairs(A[2]) do
  local pod, group, order = row[1], row[2], row[3]
  if leases[pod] then
    held[#held + 1] = pod
  else
    if is_stale(group, row[4]) then
      stale[#stale + 1] = pod
    else
      local before = call('HGET', P .. 'waiting', pod)
      local since = before and decode(before)[4] or row[6]
      leave_waiting({pod})
      local member = order .. '|' .. pod
      call('HSET', P .. 'waiting', pod, pack({group, order, capacity, since, row[5]}))
      call('ZADD', P .. 'verdicts', capacity, member)
      call('HINCRBY', P .. 'groups', group, 1)
      call('ZADD', P .. 'group:' .. group, 0, member)
    end
  end
end
return pack({stale, held})
