-- Choose waiting pods to be decided again. Arguments: now, how many at most, how many of them may be
-- chosen only because their verdict is old, seconds after which an unanswered offer is repeated.
-- Answers the capacity number and the records; each pod once per capacity number.
local now, limit, spare, retry_s = A[1], A[2], A[3], A[4]
local MAX_NODES, MAX_PASSED = 32, 256
local current = string.format('%.0f', capacity)
local chosen, members = {}, {}

local function choose(member)
  if not chosen[member] then
    chosen[member] = true
    members[#members + 1] = member
  end
end

local function is_due(member)
  local at = call('ZSCORE', P .. 'verdicts', member)
  return at and tonumber(at) < capacity
end

-- Nodes on which something was freed since the last look, and how far that look reaches.
local function freed_since(done)
  local found = call('ZRANGEBYSCORE', P .. 'freed', '(' .. done, '+inf', 'WITHSCORES',
    'LIMIT', 0, MAX_NODES)
  if #found < 2 * MAX_NODES then
    local names = {}
    for i = 1, #found, 2 do names[#names + 1] = found[i] end
    return names, current
  end
  local last = string.format('%.0f', tonumber(found[#found]))
  return call('ZRANGEBYSCORE', P .. 'freed', '(' .. done, last), last
end

local function offer_freed(names)
  for _, group in ipairs(call('HKEYS', P .. 'groups')) do
    local quota = 0
    for _, name in ipairs(names) do
      if group ~= '' and quota < limit then quota = quota + room_for(group, name) end
    end
    quota = math.min(quota, limit)
    if quota > 0 then
      for _, member in ipairs(call('ZRANGE', P .. 'group:' .. group, 0, quota + MAX_PASSED - 1)) do
        if quota > 0 and is_due(member) then
          choose(member)
          quota = quota - 1
        end
      end
    end
  end
end

local done = call('HGET', P .. 'meta', 'offered') or '0'
local names, reached = freed_since(done)
if #names > 0 then offer_freed(names) end
table.sort(members)
local cut = #members > limit
while #members > limit do table.remove(members) end
if not cut and reached ~= done then call('HSET', P .. 'meta', 'offered', reached) end

if #members < limit then
  local room = math.min(spare, limit - #members)
  local old = call('ZRANGEBYSCORE', P .. 'verdicts', '-inf', '(' .. current, 'LIMIT', 0, room)
  for _, member in ipairs(old) do choose(member) end
  local unanswered = call('ZRANGEBYSCORE', P .. 'offered', '-inf', now - retry_s, 'LIMIT', 0, room)
  for _, member in ipairs(unanswered) do choose(member) end
end

local records = {}
for _, member in ipairs(members) do
  local pod = string.match(member, '|(.*)$')
  local record = call('HGET', P .. 'waiting', pod)
  if record then
    records[#records + 1] = decode(record)[5]
    call('ZADD', P .. 'verdicts', capacity, member)
    call('ZADD', P .. 'offered', now, member)
  end
end
return pack({capacity, records})
