-- Choose waiting pods to be decided again. Arguments: now, how many at most, how many of them may be
-- pods whose verdict only a changed cluster can change, seconds after which an unanswered offer is
-- repeated. Answers the capacity number, the records, and whether nothing is left to be offered of
-- what was freed so far; each pod once per capacity number.
--
-- Of each group as many are offered as what was freed could hold, the first in order first. While
-- there is room left once they have answered, the following are offered, twice as many each time.
local now, limit, spare, retry_s = A[1], A[2], A[3], A[4]
local MAX_NODES, MAX_PAGES, CHUNK, MAX_PASSED, ROUNDS = 32, 16, 256, 8192, 8
local QUOTA_CHUNK = 16
local chosen, members, under_way = {}, {}, false

local function choose(member)
  if not chosen[member] then
    chosen[member] = true
    members[#members + 1] = member
  end
end

-- Choose up to `count` of the group whose verdict is older than the number `newest`. An offer that is
-- under way counts as one.
local function choose_due(group, count, newest)
  for from = 0, MAX_PASSED - 1, CHUNK do
    local found = call('ZRANGE', P .. 'group:' .. group, from, from + CHUNK - 1)
    if #found == 0 then return end
    local verdicts = call('ZMSCORE', P .. 'verdicts', unpack(found))
    local offered = call('ZMSCORE', P .. 'offered', unpack(found))
    for i, member in ipairs(found) do
      local awaited = offered[i] and tonumber(offered[i]) > now - AWAITED_S
      if awaited then
        under_way = true
        count = count - 1
      elseif verdicts[i] and tonumber(verdicts[i]) < newest then
        choose(member)
        count = count - 1
      end
      if count <= 0 then return end
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
local known = call('HMGET', P .. 'meta', 'offered', 'round', 'round_for', 'grown')
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
  call('HSET', P .. 'meta', 'offered', done, 'round', round, 'round_for', newest)
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
    math.min(spare, limit - #members))) do choose(member) end
end
table.sort(members)

local records = {}
for i = 1, math.min(#members, limit) do
  local member = members[i]
  local record = call('HGET', P .. 'waiting', string.match(member, '|(.*)$'))
  if record then
    records[#records + 1] = decode(record)[5]
    call('ZADD', P .. 'verdicts', capacity, member)
    call('ZADD', P .. 'offered', now, member)
  end
end
return pack({capacity, records, settled and #records == 0})
