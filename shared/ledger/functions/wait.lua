-- Add waiting pods, or remove them. Arguments: {'gone', pods}; {'bound', pods}; {'wait', WaitingRowRecords}; or
-- {'handed_over', WaitingRowRecords} of pods whose nodes kube-scheduler chooses. A verdict of -1: the capacity is
-- reserved for another pod, and is offered to this one after that.
-- Returns the pods that may fit what was freed since their verdict, to be placed again; those that have a
-- lease and need not wait; those that are gone; and those that waited already, for another reason.
local gone_pods = require('gone_pods')
local layouts = require('layouts')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local values = require('values')
local waiting = require('waiting')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode
local R, W = layouts.WAITINGROW, layouts.WAITING

-- Remove pods that are gone, or bound.
local function remove(what, pods)
  local is_gone, leaving_gang = what == 'gone', {}
  if is_gone then gone_pods.add(pods) end
  -- A lease may outlive its pod until the containers have ended. Its gang does not count it any more.
  records.fetch('leases', is_gone and pods or {})
  for _, pod in ipairs(pods) do
    if records.leases[pod] then
      call('SADD', server.prefix .. 'vanished', pod)
      local gang = records.leases[pod].request[layouts.REQUEST.GANG]
      if gang ~= '' then
        leaving_gang[#leaving_gang + 1] = gang .. '|' .. pod
        if waiting.first_of_gang(gang) then waiting.mark_gang_changed(gang) end
      end
    end
  end
  server.call_all('ZREM', 'gang-leases', leaving_gang)
  -- A pod that received the offers of its gang is replaced by the gang's next pod.
  local verdicts = {}
  for _, value in ipairs(server.call_all('HMGET', 'waiting', pods)) do
    local pod = value and waiting.waiting_of(value)
    if pod and pod[W.GANG] ~= '' then
      waiting.mark_gang_changed(pod[W.GANG])
      if pod[W.GROUP] ~= waiting.NO_OFFERS then verdicts[pod[W.GANG]] = pod[W.VERDICT] end
    end
  end
  waiting.remove_waiting(pods)
  for gang, verdict in pairs(verdicts) do
    local name, pod = waiting.first_of_gang(gang)
    if pod then
      waiting.put_waiting(name, pod[W.NEED], pod[W.ORDER], verdict, pod[W.RECORD], pod[W.SINCE], gang, true,
        pod[W.NAMESPACE])
    end
  end
  return encode({{}, {}, {}, {}})
end

local MAX_NODES = 64

-- Return whether a pod of the group may fit what was freed after a capacity number; `crowded`, if that is on
-- more nodes than are looked at.
local function may_fit_freed(group, after, crowded)
  local names = call('ZRANGEBYSCORE', server.prefix .. 'freed-nodes', '(' .. after, '+inf', 'LIMIT', 0, MAX_NODES + 1)
  if #names > MAX_NODES and crowded then return true end
  for i = 1, math.min(#names, MAX_NODES) do
    if waiting.room_for(group, names[i]) > 0 then return true end
  end
  return false
end

local function is_stale(group, verdict)
  local namespace = waiting.quota_namespace(group)
  if namespace and waiting.quota_freed(namespace) > verdict then return true end
  if group == '' or verdict >= ledger.capacity then return false end
  return may_fit_freed(group, string.format('%.0f', verdict), true)
end

local function is_outdated(group, verdict, gang, receives_offers, min_members)
  if min_members > 0 then return waiting.gang_lease_count(gang) + waiting.gang_waiting_count(gang) >= min_members end
  return receives_offers and is_stale(group, verdict)
end

local function offered_up_to() return call('HGET', server.prefix .. 'ledger', 'offered_up_to') or '0' end

-- The reason in a record {pod, refusal}.
local function reason_of(record) return (values.readable(record, parse_json)[2] or {}).reason end

local function put(row, verdict, gang, receives_offers)
  waiting.put_waiting(row[R.POD], row[R.GROUP], row[R.ORDER], verdict, row[R.RECORD], row[R.SINCE], gang,
    receives_offers, row[R.NAMESPACE])
end

-- Add pods whose node kube-scheduler chooses, and its reasons. A verdict of the extender stays, with the offers that
-- follow from it.
local function hand_over(rows)
  local pods = records.fetch_leases_of(rows)
  local is_gone, before = gone_pods.among(pods), server.call_all('HMGET', 'waiting', pods)
  for i, row in ipairs(rows) do
    local pod = row[R.POD]
    if not (is_gone[pod] or records.leases[pod]) then
      local known = before[i] and waiting.waiting_of(before[i])
      if not known or known[W.GROUP] == waiting.NO_OFFERS then
        put(row, ledger.capacity, '', false)
      end
      waiting.put_scheduler_reason(pod, row[R.SCHEDULER_REASON])
    end
  end
  return encode({{}, {}, {}, {}})
end

local function add(rows)
  local pods, reasons_changed_at = records.fetch_leases_of(rows), server.number_at('ledger', 'reasons_changed')
  local stale, with_lease, gone, is_gone = {}, {}, {}, gone_pods.among(pods)
  local changed, before = {}, server.call_all('HMGET', 'waiting', pods)
  for i, row in ipairs(rows) do
    local pod, group, verdict, gang = row[R.POD], row[R.GROUP], row[R.VERDICT], row[R.GANG]
    if is_gone[pod] then
      gone[#gone + 1] = pod
    elseif records.leases[pod] then
      with_lease[#with_lease + 1] = pod
    elseif verdict < 0 and may_fit_freed(group, offered_up_to(), false) then
      put(row, 0, gang, true)
    elseif verdict < 0 or is_outdated(group, verdict, gang, row[R.RECEIVES_OFFERS], row[R.MIN_MEMBERS]) then
      stale[#stale + 1] = pod
    else
      -- The placer may not have seen the last change of the reasons yet: the pod is offered again.
      local decided_at = verdict < reasons_changed_at and verdict or ledger.capacity
      put(row, decided_at, gang, row[R.RECEIVES_OFFERS])
      local known = before[i] and waiting.waiting_of(before[i])
      if known and reason_of(known[W.RECORD]) ~= reason_of(row[R.RECORD]) then
        changed[#changed + 1] = pod
      end
    end
  end
  return encode({stale, with_lease, gone, changed})
end

return function(what, items)
  if what == 'wait' then return add(items) end
  if what == 'handed_over' then return hand_over(items) end
  return remove(what, items)
end
