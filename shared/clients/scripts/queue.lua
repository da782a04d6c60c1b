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
  local found = records_of(pods)
  for i, pod in ipairs(pods) do
    if found[i] then
      local record = decode(found[i])
      local group, order, gang = record[1], record[2], record[6]
      local member = order .. '|' .. pod
      call('HDEL', P .. 'waiting', pod)
      call('ZREM', P .. 'offered', member)
      if gang ~= '' then call('ZREM', P .. 'mustering', gang .. '|' .. member) end
      if group ~= QUIET then
        call('ZREM', P .. 'group:' .. group, member)
        call('ZREM', P .. 'verdicts', member)
        if call('HINCRBY', P .. 'groups', group, -1) <= 0 then
          call('HDEL', P .. 'groups', group)
        end
      end
    end
  end
end

-- Write down a pod that waits, as decided on at the capacity number `verdict`; how long it does is
-- counted from its first verdict.
local function put_waiting(pod, group, order, verdict, record, since, gang, leads)
  local before = call('HGET', P .. 'waiting', pod)
  if before then
    since = decode(before)[4]
    leave_waiting({pod})
  end
  local member, place = order .. '|' .. pod, leads and group or QUIET
  call('HSET', P .. 'waiting', pod, pack({place, order, verdict, since, record, gang, group}))
  if gang ~= '' then call('ZADD', P .. 'mustering', 0, gang .. '|' .. member) end
  if leads then
    call('ZADD', P .. 'verdicts', verdict, member)
    call('HINCRBY', P .. 'groups', group, 1)
    call('ZADD', P .. 'group:' .. group, 0, member)
  end
end

local needs, uuids_here = {}, {}

local function need_of(group)
  if not needs[group] then
    local need = {}
    for part in string.gmatch(group, '%d+') do need[#need + 1] = tonumber(part) end
    needs[group] = need
  end
  return unpack(needs[group])
end

-- Could a pod of the group fit on the node, by its smallest need alone? Says how often.
local function room_for(group, name)
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

-- Waiting pods to whom something that was freed is being offered, or is about to be: the first few of
-- each group, with rank (lower: higher priority), verdict, and whether an offer is under way.
local GUARDED_GROUPS, GUARDS, AWAITED_S = 64, 4, 2

local function guards_at(now, below)
  local guards = {}
  if call('EXISTS', P .. 'waiting') == 0 then return guards end
  local groups = call('HKEYS', P .. 'groups')
  for g = 1, math.min(#groups, GUARDED_GROUPS) do
    local members = groups[g] ~= '' and call('ZRANGE', P .. 'group:' .. groups[g], 0, GUARDS - 1) or {}
    for _, member in ipairs(members) do
      local rank = tonumber(string.sub(member, 1, 10))
      if rank >= below then break end
      local offered = tonumber(call('ZSCORE', P .. 'offered', member) or 0)
      local verdict = tonumber(call('ZSCORE', P .. 'verdicts', member) or capacity)
      if offered > now - AWAITED_S or verdict < capacity then
        guards[#guards + 1] = {rank, groups[g], verdict, offered > now - AWAITED_S,
          string.match(member, '|(.*)$')}
      end
    end
  end
  return guards
end

-- Is what is free on the node kept for a pod of higher priority than `rank`?
local freed_at = {}
local function is_kept(guards, pod, rank, name)
  for _, guard in ipairs(guards) do
    if guard[1] < rank and guard[5] ~= pod then
      freed_at[name] = freed_at[name] or tonumber(call('ZSCORE', P .. 'freed', name) or 0)
      if (guard[4] or guard[3] < freed_at[name]) and room_for(guard[2], name) > 0 then return true end
    end
  end
  return false
end
