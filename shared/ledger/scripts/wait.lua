-- Remember pods that fit nowhere, or forget them. Arguments: {'forget', pods} or {'wait', rows of
-- {pod, group ('' if no freed capacity can help), order, capacity number decided on, record, since,
-- gang ('' if none), whether what is freed is offered to it, how few of its gang are here if that is
-- the verdict (else 0), namespace}}. Decided on at -1: what it would have
-- taken is kept for another, and is offered to it after that one.
-- Answers the pods for which what was freed since the decision may be enough: decide again; and
-- those that hold a lease and need not wait.
if A[1] == 'forget' then
  local leaderless = {}
  for _, value in ipairs(records_of(A[2])) do
    local record = value and decode(value)
    if record and record[6] ~= '' and record[1] ~= QUIET then leaderless[record[6]] = record[3] end
  end
  leave_waiting(A[2])
  for gang, verdict in pairs(leaderless) do
    local from, to = gang_range(gang)
    local first = call('ZRANGEBYLEX', P .. 'mustering', from, to, 'LIMIT', 0, 1)[1]
    local pod = first and string.match(first, '([^|]*)$')
    if pod then
      local record = decode(call('HGET', P .. 'waiting', pod))
      put_waiting(pod, record[7], record[2], verdict, record[5], record[4], gang, true, record[8])
    end
  end
  return pack({{}, {}})
end

local LOOK_AT = 64

local function is_stale(group, decided_on)
  local namespace = string.match(group, '^q:([^|]*)')
  for _, number in ipairs(namespace and call('HMGET', P .. 'quota-freed', namespace, '*') or {}) do
    if number and tonumber(number) > decided_on then return true end
  end
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

-- Is there still anything to be offered that a pod of the group may fit?
local function is_pending(group)
  local done = call('HGET', P .. 'ledger', 'offered') or '0'
  for _, name in ipairs(call('ZRANGEBYSCORE', P .. 'freed', '(' .. done, '+inf', 'LIMIT', 0, LOOK_AT)) do
    if room_for(group, name) > 0 then return true end
  end
  return false
end

local function is_outdated(row)
  if row[9] > 0 then return held_by(row[7]) + mustered(row[7]) >= row[9] end
  return row[8] and is_stale(row[2], row[4])
end

local pods = {}
for i, row in ipairs(A[2]) do pods[i] = row[1] end
fetch('leases', pods)

local stale, held = {}, {}
for _, row in ipairs(A[2]) do
  local pod, group, order = row[1], row[2], row[3]
  if leases[pod] then
    held[#held + 1] = pod
  elseif row[4] < 0 and is_pending(group) then
    put_waiting(pod, group, order, 0, row[5], row[6], row[7], true, row[10])
  elseif row[4] < 0 or is_outdated(row) then
    stale[#stale + 1] = pod
  else
    put_waiting(pod, group, order, capacity, row[5], row[6], row[7], row[8], row[10])
  end
end
return pack({stale, held})
