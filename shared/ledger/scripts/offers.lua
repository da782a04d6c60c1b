-- Choose waiting pods to be decided again. Arguments: now, how many at most, how many of them may be
-- pods whose verdict only a changed cluster can change, seconds after which an unanswered offer is
-- repeated. Answers the capacity number, the records, and whether nothing is left to be offered of
-- what was freed so far; each pod once per capacity number.
--
-- Of each group as many are offered as what was freed could hold, in the order of fair.lua: whoever is
-- chosen counts as held by his namespace when the next one is. While there is room left once they have
-- answered, the following are offered, twice as many each time.
local now, limit, spare, retry_s = A[1], A[2], A[3], A[4]
local MAX_NODES, MAX_PAGES, CHUNK, MAX_PASSED, ROUNDS = 32, 16, 256, 8192, 8
local QUOTA_CHUNK, FIRST_CHUNK, LINES = 16, 16, 32
local chosen, members, under_way, promised = {}, {}, false, {}

if call('HGET', P .. 'ledger', 'relined') == '0' then fair.reline_all() end

local function choose(member, position)
  if not chosen[member] then
    chosen[member] = true
    members[#members + 1] = {position, member}
  end
end

local choose_due
do
local function promise(namespace, cores, mib)
  local before = promised[namespace] or {0, 0}
  promised[namespace] = {before[1] + cores, before[2] + mib}
end

-- A queue of a line as it is gone through: `position` is that of its next pod that is due or has an
-- offer, once it `is_exact`; until then that of its first pod.
local passed = 0
local function queue_of(entry, group)
  local namespace = string.match(entry, '|(.*)$')
  local position = string.sub(entry, 1, #entry - #namespace - 1)
  if promised[namespace] then
    position = fair.position(namespace, string.sub(position, 2, 11) .. string.sub(position, 28),
      promised[namespace])
  end
  return {namespace = namespace, key = fair.queue(namespace, group), position = position, read = 0,
    at = 0, members = {}, verdicts = {}, offered = {}}
end

local function read_more(queue)
  local most = queue.read == 0 and FIRST_CHUNK or CHUNK
  local found = call('ZRANGE', queue.key, queue.read, queue.read + most - 1)
  queue.read, queue.at, queue.members = queue.read + most, 1, found
  if #found > 0 then
    queue.verdicts = call('ZMSCORE', P .. 'verdicts', unpack(found))
    queue.offered = call('ZMSCORE', P .. 'offered', unpack(found))
  end
end

-- Go on to the next pod that is due at `newest` or has an offer; false if there is none.
local function go_on(queue, newest)
  while passed < MAX_PASSED do
    queue.at = queue.at + 1
    if queue.at > #queue.members then
      if queue.read > 0 and #queue.members < FIRST_CHUNK then return false end
      read_more(queue)
      if #queue.members == 0 then return false end
    end
    local member = queue.members[queue.at]
    local verdict, offered = queue.verdicts[queue.at], queue.offered[queue.at]
    queue.awaited = offered and tonumber(offered) > now - AWAITED_S
    if queue.awaited or (verdict and tonumber(verdict) < newest) then
      queue.position = fair.position(queue.namespace, member, promised[queue.namespace])
      queue.is_exact = true
      return true
    end
    passed = passed + 1
  end
  return false
end

-- Choose up to `count` of the group whose verdict is older than the number `newest`. An offer that is
-- under way counts as one.
function choose_due(group, count, newest)
  local queues, read, last = {}, 0, nil
  local cores, mib = fair.need_of(group)
  while count > 0 do
    local best = 1
    for i = 2, #queues do
      if queues[i].position < queues[best].position then best = i end
    end
    local queue = queues[best]
    if (not queue or last and queue.position > last) and read then
      local found = call('ZRANGE', P .. 'line:' .. group, read, read + LINES - 1)
      for _, entry in ipairs(found) do queues[#queues + 1] = queue_of(entry, group) end
      read, last = #found == LINES and read + LINES, found[#found]
    elseif not queue then
      return
    elseif not queue.is_exact then
      if not go_on(queue, newest) then table.remove(queues, best) end
    else
      if queue.awaited then
        under_way = true
      else
        choose(queue.members[queue.at], queue.position)
      end
      promise(queue.namespace, cores, mib)
      count = count - 1
      queue.is_exact = false
      queue.position = fair.position(queue.namespace, queue.members[queue.at],
        promised[queue.namespace])
    end
  end
end
end

-- Nodes on which something was freed after `done`, each before the number at which it was, and how
-- far this reaches.
local function freed_since(done)
  local found = call('ZRANGEBYSCORE', P .. 'freed', '(' .. done, '+inf', 'WITHSCORES',
    'LIMIT', 0, MAX_NODES)
  if #found < 2 * MAX_NODES then return found, string.format('%.0f', capacity) end
  local last = string.format('%.0f', tonumber(found[#found]))
  return call('ZRANGEBYSCORE', P .. 'freed', '(' .. done, last, 'WITHSCORES'), last
end

local function quota_freed(namespace)
  local found = call('HMGET', P .. 'quota-freed', namespace, '*')
  return math.max(tonumber(found[1] or 0), tonumber(found[2] or 0))
end

local groups = call('HKEYS', P .. 'groups')
local awaiting = call('ZCOUNT', P .. 'offered', '(' .. now - AWAITED_S, '+inf') > 0

local function offer_freed(freed_here, round)
  for _, group in ipairs(groups) do
    local room, newest = 0, 0
    for i = 1, group == '' and 0 or #freed_here, 2 do
      local here = room < limit and room_for(group, freed_here[i]) or 0
      if here > 0 then
        room = room + here
        newest = math.max(newest, tonumber(freed_here[i + 1]))
      end
    end
    local times = 2 ^ (awaiting and math.max(round - 1, 0) or round)
    if room > 0 then choose_due(group, math.min(room * times, limit), newest) end
  end
end

-- The rounds are counted anew whenever more is freed.
local known = call('HMGET', P .. 'ledger', 'offered', 'round', 'round_for', 'grown')
local done, grown = known[1] or '0', tonumber(known[4] or 0)
local newest = call('ZREVRANGE', P .. 'freed', 0, 0, 'WITHSCORES')[2] or '0'
local round = known[3] == newest and tonumber(known[2]) or 0
local settled = false
for _ = 1, MAX_PAGES do
  local freed_here, reached = freed_since(done)
  if #groups > 0 and #freed_here > 0 and round < ROUNDS then offer_freed(freed_here, round) end
  if #members > 0 or under_way then break end
  done, round = reached, 0
  settled = tonumber(reached) >= capacity
  if settled then break end
end
if #members > 0 and not awaiting then round = round + 1 end
if done ~= known[1] or round ~= tonumber(known[2] or 0) or newest ~= known[3] then
  call('HSET', P .. 'ledger', 'offered', done, 'round', round, 'round_for', newest)
end
-- A namespace has more left of its quota: its first waiting pods, some more once these have answered.
local quotas_due = call('HGETALL', P .. 'quota-due')
for i = 1, #quotas_due, 2 do
  local namespace, rounds, before = quotas_due[i], tonumber(quotas_due[i + 1]), #members
  under_way = false
  for _, group in ipairs(groups) do
    if string.match(group, '^q:([^|]*)') == namespace then
      choose_due(group, QUOTA_CHUNK, rounds > 0 and quota_freed(namespace) or 0)
    end
  end
  if #members > before then
    call('HSET', P .. 'quota-due', namespace, rounds - 1)
  elseif not under_way then
    call('HDEL', P .. 'quota-due', namespace)
  end
  settled = false
end
if spare > 0 then
  local before = #members
  choose_due('', spare, grown)
  settled = settled and #members == before
end
if #members < limit then
  for _, member in ipairs(call('ZRANGEBYSCORE', P .. 'offered', '-inf', now - retry_s, 'LIMIT', 0,
    math.min(spare, limit - #members))) do choose(member, '2') end
end
table.sort(members, function(one, other)
  return one[1] < other[1] or (one[1] == other[1] and one[2] < other[2])
end)

local records = {}
for i = 1, math.min(#members, limit) do
  local member = members[i][2]
  local record = call('HGET', P .. 'waiting', string.match(member, '|(.*)$'))
  if record then
    records[#records + 1] = decode(record)[5]
    call('ZADD', P .. 'verdicts', capacity, member)
    call('ZADD', P .. 'offered', now, member)
  end
end
return pack({capacity, records, settled and #records == 0})
