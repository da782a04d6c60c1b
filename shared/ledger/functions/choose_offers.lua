-- Choose waiting pods to which freed capacity is offered: they are placed again; and pods whose verdict
-- may have other reasons by now. Arguments: now; maximum number; how many of them may be pods that no freed
-- capacity can help; of how many changed gangs a pod is chosen.
-- Returns the capacity number, the records, and whether all freed capacity has been offered. Each pod is
-- chosen once per capacity number, and again if it was not decided within OFFER_S.
--
-- Of each group, as many pods are chosen as could fit the freed capacity, in the order of fair.lua;
-- each one counts as used by its namespace when the next one is chosen. While capacity is left after their
-- decisions, the following pods are chosen, twice as many each time.
local fair = require('fair')
local layouts = require('layouts')
local ledger = require('ledger')
local server = require('server')
local values = require('values')
local waiting = require('waiting')
local call, encode = redis.call, cmsgpack.pack
local W = layouts.WAITING
local OFFER_S = waiting.OFFER_S
local MAX_NODES, MAX_PAGES, CHUNK, MAX_SKIPPED, MAX_ROUNDS = 32, 16, 256, 8192, 8
local QUOTA_CHUNK, FIRST_CHUNK, MAX_QUEUES = 16, 16, 32

-- Of this call: arguments; what is chosen, as rows of {position, member}; {namespace -> what is promised to it}; and
-- how many pods were passed over.
local now, limit, groups, ordered_groups, is_awaiting_answers
local is_chosen, members, has_open_offers, promised, skipped

local function comes_before(one, other)
  return one[1] < other[1] or (one[1] == other[1] and one[2] < other[2])
end

local function choose(member, position)
  if not is_chosen[member] then
    is_chosen[member] = true
    members[#members + 1] = {position, member}
  end
end

local function promise(namespace, cores, mib)
  local before = promised[namespace] or {0, 0}
  promised[namespace] = {before[1] + cores, before[2] + mib}
end

-- One namespace's queue of a group. Once it `is_exact`, `position` is that of the next pod that can be
-- chosen or has an offer; until then that of its first pod.
local function queue_of(entry, group)
  local namespace = string.match(entry, '|(.*)$')
  local position = string.sub(entry, 1, #entry - #namespace - 1)
  if promised[namespace] then
    position = fair.position(namespace, string.sub(position, 2, 11) .. string.sub(position, 28),
      promised[namespace])
  end
  return {namespace = namespace, key = fair.queue(namespace, group), position = position, read = 0,
    at = 0, members = {}, verdicts = {}, offers = {}}
end

local function read_more(queue)
  local most = queue.read == 0 and FIRST_CHUNK or CHUNK
  local found = call('ZRANGE', queue.key, queue.read, queue.read + most - 1)
  queue.read, queue.at, queue.members = queue.read + most, 1, found
  if #found > 0 then
    queue.verdicts = call('ZMSCORE', server.prefix .. 'verdicts', unpack(found))
    queue.offers = call('ZMSCORE', server.prefix .. 'offers', unpack(found))
  end
end

-- Advance to the next pod whose verdict is older than `newest` or that has an offer; false if none.
local function advance(queue, newest)
  while skipped < MAX_SKIPPED do
    queue.at = queue.at + 1
    if queue.at > #queue.members then
      if queue.read > 0 and #queue.members < FIRST_CHUNK then return false end
      read_more(queue)
      if #queue.members == 0 then return false end
    end
    local member = queue.members[queue.at]
    local verdict, offered_at = queue.verdicts[queue.at], queue.offers[queue.at]
    queue.has_open_offer = offered_at and tonumber(offered_at) > now - OFFER_S
    if queue.has_open_offer or (verdict and tonumber(verdict) < newest) then
      queue.position = fair.position(queue.namespace, member, promised[queue.namespace])
      queue.is_exact = true
      return true
    end
    skipped = skipped + 1
  end
  return false
end

-- Choose up to `count` of the group whose verdict is older than the number `newest`. An offer that was not
-- decided yet counts as one.
local function choose_from_group(group, count, newest)
  local queues, next_queue, last_entry_read = {}, 0, nil
  local cores, mib = waiting.need_of(group)
  while count > 0 do
    local best = 1
    for i = 2, #queues do
      if queues[i].position < queues[best].position then best = i end
    end
    local queue = queues[best]
    if (not queue or last_entry_read and queue.position > last_entry_read) and next_queue then
      local found =
        call('ZRANGE', server.prefix .. 'group-order:' .. group, next_queue, next_queue + MAX_QUEUES - 1)
      for _, entry in ipairs(found) do queues[#queues + 1] = queue_of(entry, group) end
      next_queue, last_entry_read = #found == MAX_QUEUES and next_queue + MAX_QUEUES, found[#found]
    elseif not queue then
      return
    elseif not queue.is_exact then
      if not advance(queue, newest) then table.remove(queues, best) end
    else
      if queue.has_open_offer then
        has_open_offers = true
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

-- Nodes with capacity freed after the number `done`, each followed by its number, and the number up to
-- which this is complete.
local function freed_since(done)
  local found = call('ZRANGEBYSCORE', server.prefix .. 'freed-nodes', '(' .. done, '+inf', 'WITHSCORES',
    'LIMIT', 0, MAX_NODES)
  if #found < 2 * MAX_NODES then return found, string.format('%.0f', ledger.capacity) end
  local last = string.format('%.0f', tonumber(found[#found]))
  return call('ZRANGEBYSCORE', server.prefix .. 'freed-nodes', '(' .. done, last, 'WITHSCORES'), last
end

-- The groups whose pods may be offered what was freed, each with the first entry of its order: first the group whose
-- first pod comes before those of the others.
local function in_order()
  local rows = {}
  for _, group in ipairs(groups) do
    local first = group ~= '' and call('ZRANGE', server.prefix .. 'group-order:' .. group, 0, 0)[1]
    if first then rows[#rows + 1] = {first, group} end
  end
  table.sort(rows, comes_before)
  return rows
end

local function last_position()
  local last = ''
  for _, row in ipairs(members) do
    if row[1] > last then last = row[1] end
  end
  return last
end

-- Once enough are chosen, groups are passed over whose pods all come after these: they would be left out.
local function offer_freed(freed, round)
  local last, most = nil, waiting.most_free(freed)
  ordered_groups = ordered_groups or in_order()
  for _, row in ipairs(ordered_groups) do
    local entry, group = row[1], row[2]
    local room, newest = 0, 0
    last = last or #members >= limit and last_position()
    local is_left_out = waiting.exceeds(group, most) or last and queue_of(entry, group).position >= last
    for i = 1, is_left_out and 0 or #freed, 2 do
      local room_here = room < limit and waiting.room_for(group, freed[i]) or 0
      if room_here > 0 then
        room = room + room_here
        newest = math.max(newest, tonumber(freed[i + 1]))
      end
    end
    local times = 2 ^ (is_awaiting_answers and math.max(round - 1, 0) or round)
    if room > 0 then choose_from_group(group, math.min(room * times, limit), newest) end
  end
end

return function(at, most, spare, gangs)
  now, limit, ordered_groups = at, most, nil
  is_chosen, members, has_open_offers, promised, skipped = {}, {}, false, {}, 0
  if call('HGET', server.prefix .. 'ledger', 'is_ordered') == '0' then fair.reorder_all() end
  groups = call('HKEYS', server.prefix .. 'waiting-groups')
  is_awaiting_answers = call('ZCOUNT', server.prefix .. 'offers', '(' .. now - OFFER_S, '+inf') > 0

  -- Rounds start again whenever more is freed.
  local stored =
    call('HMGET', server.prefix .. 'ledger', 'offered_up_to', 'offer_round', 'offer_round_for', 'inventory_grew',
      'reasons_changed')
  local done = stored[1] or '0'
  local newest = call('ZREVRANGE', server.prefix .. 'freed-nodes', 0, 0, 'WITHSCORES')[2] or '0'
  local round = stored[3] == newest and tonumber(stored[2]) or 0
  local is_complete = false
  for _ = 1, MAX_PAGES do
    local freed, reached = freed_since(done)
    if #groups > 0 and #freed > 0 and round < MAX_ROUNDS then offer_freed(freed, round) end
    if #members > 0 or has_open_offers then break end
    done, round = reached, 0
    is_complete = tonumber(reached) >= ledger.capacity
    if is_complete then break end
  end
  if #members > 0 and not is_awaiting_answers then round = round + 1 end
  if done ~= stored[1] or round ~= tonumber(stored[2] or 0) or newest ~= stored[3] then
    call('HSET', server.prefix .. 'ledger', 'offered_up_to', done, 'offer_round', round, 'offer_round_for', newest)
  end
  -- A namespace's quota has more left: offer it to its first waiting pods, and to the next ones once these
  -- are decided.
  local quota_groups = waiting.quota_groups(groups)
  for namespace, stored_times in values.each_pair(call('HGETALL', server.prefix .. 'quota-offers')) do
    local times, before = tonumber(stored_times), #members
    has_open_offers = false
    for _, group in ipairs(quota_groups[namespace] or {}) do
      choose_from_group(group, QUOTA_CHUNK, times > 0 and waiting.quota_freed(namespace) or 0)
    end
    if #members > before then
      call('HSET', server.prefix .. 'quota-offers', namespace, times - 1)
    elseif not has_open_offers then
      call('HDEL', server.prefix .. 'quota-offers', namespace)
    end
    is_complete = false
  end
  if spare > 0 then
    local before = #members
    has_open_offers = false
    choose_from_group('', spare, tonumber(stored[4] or 0))
    -- Those that are offered nothing come after all others.
    for _, member in ipairs(call('ZRANGEBYSCORE', server.prefix .. 'verdicts', '(0', '(' .. (stored[5] or '0'),
      'LIMIT', 0, spare)) do choose(member, '3') end
    is_complete = is_complete and #members == before and not has_open_offers
  end
  -- An offer may be lost on its way. These do not count: a pod that is never decided would keep this busy.
  local chosen = #members
  if #members < limit then
    for _, member in ipairs(call('ZRANGEBYSCORE', server.prefix .. 'offers', '-inf', now - OFFER_S, 'LIMIT', 0,
      math.min(spare, limit - #members))) do choose(member, '2') end
  end
  table.sort(members, comes_before)

  local records = {}
  for i = 1, math.min(#members, limit) do
    local member = members[i][2]
    local value = call('HGET', server.prefix .. 'waiting', string.match(member, '|(.*)$'))
    local pod = value and waiting.waiting_of(value)
    if pod then
      records[#records + 1] = pod[W.RECORD]
      call('ZADD', server.prefix .. 'verdicts', ledger.capacity, member)
      if members[i][1] ~= '3' then call('ZADD', server.prefix .. 'offers', now, member) end
    end
  end
  -- One pod of a changed gang is enough: the verdicts of all its pods are decided with it.
  for _, gang in ipairs(call('SPOP', server.prefix .. 'changed-gangs', gangs)) do
    local name, pod = waiting.first_of_gang(gang)
    if pod and not is_chosen[pod[W.ORDER] .. '|' .. name] then records[#records + 1] = pod[W.RECORD] end
  end
  return encode({ledger.capacity, records, is_complete and (chosen == 0 or #records == 0)})
end
