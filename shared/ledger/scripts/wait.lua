-- Remember pods that fit nowhere, or forget them. Arguments: {'forget', pods} or {'wait', rows of {pod,
-- group of its need ('': no freed capacity can help), order, capacity number of the verdict, record,
-- since, gang ('': none), whether freed capacity is offered to it, fewer of its gang than this are here
-- (0: that is not the verdict), namespace}}. A capacity number of -1: what it would have taken is
-- reserved for another pod, and is offered to it after that one.
-- Answers the pods for which what was freed since their verdict may be enough, to be decided again; and
-- those that hold a lease and need not wait.
if ARGS[1] == 'forget' then
  -- A pod that received the offers of its gang is replaced by the gang's next pod.
  local gangs = {}
  for _, value in ipairs(waiting_records(ARGS[2])) do
    local pod = value and decode(value)
    if pod and pod[W.GANG] ~= '' and pod[W.GROUP] ~= NO_OFFERS then gangs[pod[W.GANG]] = pod[W.VERDICT] end
  end
  remove_waiting(ARGS[2])
  for gang, verdict in pairs(gangs) do
    local from, to = gang_range(gang)
    local first = call('ZRANGEBYLEX', PREFIX .. 'gang-waiting', from, to, 'LIMIT', 0, 1)[1]
    local name = first and string.match(first, '([^|]*)$')
    if name then
      local pod = decode(call('HGET', PREFIX .. 'waiting', name))
      put_waiting(name, pod[W.NEED], pod[W.ORDER], verdict, pod[W.RECORD], pod[W.SINCE], gang, true,
        pod[W.NAMESPACE])
    end
  end
  return encode({{}, {}})
end

local MAX_NODES = 64

local function is_stale(group, verdict)
  local namespace = quota_namespace(group)
  for _, number in ipairs(namespace and call('HMGET', PREFIX .. 'quota-freed', namespace, '*') or {}) do
    if number and tonumber(number) > verdict then return true end
  end
  if group == '' or verdict >= capacity then return false end
  local names = call('ZRANGEBYSCORE', PREFIX .. 'freed-nodes', '(' .. string.format('%.0f', verdict),
    '+inf', 'LIMIT', 0, MAX_NODES + 1)
  if #names > MAX_NODES then return true end
  for _, name in ipairs(names) do
    if room_for(group, name) > 0 then return true end
  end
  return false
end

-- Is there freed capacity still to be offered that a pod of the group may fit?
local function has_pending_offers(group)
  local done = call('HGET', PREFIX .. 'ledger', 'offered_up_to') or '0'
  local names =
    call('ZRANGEBYSCORE', PREFIX .. 'freed-nodes', '(' .. done, '+inf', 'LIMIT', 0, MAX_NODES)
  for _, name in ipairs(names) do
    if room_for(group, name) > 0 then return true end
  end
  return false
end

local function is_outdated(group, verdict, gang, receives_offers, min_members)
  if min_members > 0 then return gang_lease_count(gang) + gang_waiting_count(gang) >= min_members end
  return receives_offers and is_stale(group, verdict)
end

local pods = {}
for i, row in ipairs(ARGS[2]) do pods[i] = row[1] end
fetch('leases', pods)

local stale, with_lease = {}, {}
for _, row in ipairs(ARGS[2]) do
  local pod, group, order, verdict, record, since, gang, receives_offers, min_members, namespace =
    unpack(row)
  if leases[pod] then
    with_lease[#with_lease + 1] = pod
  elseif verdict < 0 and has_pending_offers(group) then
    put_waiting(pod, group, order, 0, record, since, gang, true, namespace)
  elseif verdict < 0 or is_outdated(group, verdict, gang, receives_offers, min_members) then
    stale[#stale + 1] = pod
  else
    put_waiting(pod, group, order, capacity, record, since, gang, receives_offers, namespace)
  end
end
return encode({stale, with_lease})
