-- Pods that wait: how they leave, and what room there is for them.

-- In place of a group: nothing is offered to this pod, but to another of its gang, if to any.
local QUIET = '-'

-- The range of all members of a gang in a set of {gang|...}.
local function gang_range(gang)
  return '[' .. gang .. '|', '(' .. gang .. '}'
end

-- How many pods of the gang hold a live lease; how many wait.
local function held_by(gang)
  return call('ZLEXCOUNT', P .. 'ganged', gang_range(gang))
end

local function mustered(gang)
  return call('ZLEXCOUNT', P .. 'mustering', gang_range(gang))
end

local function records_of(pods)
  local found = {}
  for from = 1, #pods, MAX_ARGS do
    local part =
      call('HMGET', P .. 'waiting', unpack(pods, from, math.min(from + MAX_ARGS - 1, #pods)))
    for i = 1, #part do found[from + i - 1] = part[i] end
  end
  return found
end

local function leave_waiting(pods)
  if #pods == 0 or call('EXISTS', P .. 'waiting') == 0 then return end
  local found, left = records_of(pods), {}
  for i, pod in ipairs(pods) do
    if found[i] then
      local record = decode(found[i])
      local group, order, gang, namespace = record[1], record[2], record[6], record[8]
      local member = order .. '|' .. pod
      call('HDEL', P .. 'waiting', pod)
      call('ZREM', P .. 'offered', member)
      if gang ~= '' then call('ZREM', P .. 'mustering', gang .. '|' .. member) end
      if group ~= QUIET then
        call('ZREM', P .. 'verdicts', member)
        call('ZREM', fair.queue(namespace, group), member)
        left[namespace .. '|' .. group] = {namespace, group}
        if call('HINCRBY', P .. 'groups', group, -1) <= 0 then
          call('HDEL', P .. 'groups', group)
        end
      end
    end
  end
  for _, queue in pairs(left) do fair.reline(queue[1], queue[2]) end
end

-- Write down a pod that waits, as decided on at the capacity number `verdict`; how long it does is
-- counted from its first verdict.
local function put_waiting(pod, group, order, verdict, record, since, gang, leads, namespace)
  local before = call('HGET', P .. 'waiting', pod)
  if before then
    since = decode(before)[4]
    leave_waiting({pod})
  end
  local member, place = order .. '|' .. pod, leads and group or QUIET
  call('HSET', P .. 'waiting', pod, pack({place, order, verdict, since, record, gang, group,
    namespace}))
  if gang ~= '' then call('ZADD', P .. 'mustering', 0, gang .. '|' .. member) end
  if leads then
    call('ZADD', P .. 'verdicts', verdict, member)
    call('HINCRBY', P .. 'groups', group, 1)
    call('ZADD', fair.queue(namespace, group), 0, member)
    fair.reline(namespace, group)
  end
end

local room_for
do -- A script may have 200 local names.
local needs, uuids_here = {}, {}

local function need_of(group)
  if not needs[group] then
    local need = {}
    for part in string.gmatch(group, '%d+') do need[#need + 1] = tonumber(part) end
    needs[group] = need
  end
  return unpack(needs[group])
end

-- About what a pod of the group takes: cores, and MiB. Exactly that is known once it is placed.
function fair.need_of(group)
  local by_need = string.match(group, '^q:[^|]*|?(.*)$') or group
  if by_need == '' then return 0, 0 end
  local gpus, units, percent, cores, _, _, mib = need_of(by_need)
  local total = fair.total_of()
  local device_mib = 100 * total[2] / total[1]
  if units == 0 and percent == 0 and mib == 0 then return 100 * gpus, device_mib * gpus end
  local each = mib > 0 and mib or percent > 0 and device_mib * percent / 100 or units * fair.unit
  return cores * gpus, each * gpus
end

-- Could a pod of the group fit on the node, by its smallest need alone? Says how often.
function room_for(group, name)
  if string.sub(group, 1, 2) == 'q:' then
    group = string.match(group, '|(.*)$')
    if not group then return 0 end
  end
  local gpus, units, percent, cores, company, slotted, mib, slots = need_of(group)
  if gpus == 0 then return 1 end
  if not uuids_here[name] then
    uuids_here[name] = uuids_on(name)
    fetch('devices', uuids_here[name])
  end
  local times, fitting = 0, 0
  for _, uuid in ipairs(uuids_here[name]) do
    local device = devices[uuid]
    local mig = device and device[D_MODE] == 1
    if device and device[D_OK] == 1 and device[D_NODE] == name and device[D_ALONE] == 0
      and (mig or ((device[D_CORES] < 100 or company == ANY)
      and not ((company == ALONE or company == IDLE) and device[D_SHARES] > 0))) then
      local unit, need = device[D_UNIT], device[D_MEMORY]
      fair.unit = unit
      if percent > 0 then
        need = math.floor(math.floor(device[D_MEMORY] / unit) * percent / 100) * unit
      elseif mib > 0 then
        need = mib
      elseif units > 0 then
        need = units * unit
      end
      local n = need > 0 and math.floor((device[D_MEMORY] - device[D_USED]) / need) or 64
      if mig then
        -- Who asks for all of it gets the largest instance, which may be any part.
        if need > device[D_MEMORY] - unit and device[D_USED] < need then n = 1 end
      else
        if cores > 0 then n = math.min(n, math.floor((100 - device[D_CORES]) / cores)) end
        if slotted == 1 then
          n = math.min(n, (slots > 0 and slots or device[D_SLOTS]) - device[D_SHARES])
        end
      end
      if n > 0 then
        fitting = fitting + 1
        times = times + n
      end
    end
  end
  if fitting < gpus then return 0 end
  return math.max(1, math.floor(times / gpus))
end
end

-- Waiting pods to whom something that was freed is being offered, or is about to be: the first few of
-- each group, with what sorts them, verdict, and whether an offer is under way.
local AWAITED_S = 2
do
local GUARDED_GROUPS, GUARDS = 64, 4

local function is_offering(now)
  if call('EXISTS', P .. 'waiting') == 0 then return false end
  return tonumber(call('HGET', P .. 'ledger', 'offered') or 0) < capacity
    or call('ZCOUNT', P .. 'offered', '(' .. now - AWAITED_S, '+inf') > 0
end

-- Could a pod in this line come before one of those that ask, {namespace -> its lowest rank}?
local function may_come_before(entry, asking)
  local right, rank = string.sub(entry, 1, 1), string.sub(entry, 2, 11)
  for namespace, lowest in pairs(asking) do
    if string.match(entry, '|(.*)$') ~= namespace then
      if entry < fair.prefix(namespace, lowest, {1e15, 0}) then return true end
    elseif rank < lowest then
      return true
    end
  end
  return false
end

function fair.guards_at(now, asking)
  local guards = {}
  if not is_offering(now) then return guards end
  local groups = call('HKEYS', P .. 'groups')
  for g = 1, math.min(#groups, GUARDED_GROUPS) do
    local group, left = groups[g], groups[g] ~= '' and GUARDS or 0
    for _, entry in ipairs(left > 0 and call('ZRANGE', P .. 'line:' .. group, 0, GUARDS - 1) or {}) do
      if left == 0 or not may_come_before(entry, asking) then break end
      local namespace = string.match(entry, '|(.*)$')
      for _, member in ipairs(call('ZRANGE', fair.queue(namespace, group), 0, left - 1)) do
        left = left - 1
        local offered = tonumber(call('ZSCORE', P .. 'offered', member) or 0)
        local verdict = tonumber(call('ZSCORE', P .. 'verdicts', member) or capacity)
        if offered > now - AWAITED_S or verdict < capacity then
          local rank = string.sub(member, 1, 10)
          guards[#guards + 1] = {
            before = fair.prefix(namespace, rank), rank = rank, namespace = namespace,
            group = group, verdict = verdict, awaited = offered > now - AWAITED_S,
            pod = string.match(member, '|(.*)$'),
          }
        end
      end
    end
  end
  return guards
end

-- Is what is free on the node kept for a pod that comes before this one of `rank`? Between pods of one
-- namespace only the rank counts.
local freed_at = {}
function fair.is_kept(guards, pod, namespace, rank, name)
  local mine = fair.prefix(namespace, rank, fair.added[namespace])
  for _, guard in ipairs(guards) do
    local is_before = guard.before < mine
    if guard.namespace == namespace then is_before = guard.rank < rank end
    if is_before and guard.pod ~= pod then
      freed_at[name] = freed_at[name] or tonumber(call('ZSCORE', P .. 'freed', name) or 0)
      if (guard.awaited or guard.verdict < freed_at[name]) and room_for(guard.group, name) > 0 then
        return true
      end
    end
  end
  return false
end
end
