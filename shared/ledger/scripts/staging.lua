-- Evidence that several binders collect for a rebuild, stored until it begins or the evidence expires. Texts are
-- bytes of the caller's, and replies are no larger than a page. Arguments: an action and its arguments. `listing`
-- returns one, and its number of chunks, that is complete and answers a request, once all quotas are known; `reports`
-- returns nodes, each followed by its newest text, from a position on: one with a new text gets the next position, if
-- it has fewer than MOST_POSITIONS: a node that always reports something else would hold up the rebuild.
local LISTINGS, TTL_S = PREFIX .. 'stage:listings', 600
local REPORTS, REPORTED_AT, REPORT_ORDER, POSITIONS =
  PREFIX .. 'stage:reports', PREFIX .. 'stage:reported-at', PREFIX .. 'stage:report-order', PREFIX .. 'stage:positions'
local MOST_POSITIONS = 16

local function is_complete(listing, chunks)
  return call('HLEN', PREFIX .. 'stage:listing:' .. listing) >= chunks
end

local actions = {}

function actions.save_chunk(listing, chunk, chunks, request_ids, text)
  local key = PREFIX .. 'stage:listing:' .. listing
  call('HSET', key, chunk, text)
  call('EXPIRE', key, TTL_S)
  for _, known in ipairs(call('HKEYS', LISTINGS)) do
    if call('EXISTS', PREFIX .. 'stage:listing:' .. known) == 0 then call('HDEL', LISTINGS, known) end
  end
  call('HSET', LISTINGS, listing, encode({request_ids, chunks}))
  call('EXPIRE', LISTINGS, TTL_S)
  return encode(is_complete(listing, chunks))
end

function actions.listing(request_id)
  if not call('HGET', PREFIX .. 'ledger', 'quotas') then return encode(false) end
  for listing, stored in each_packed(LISTINGS) do
    local request_ids, chunks = unpack(stored)
    for _, answered in ipairs(request_ids or {}) do
      if answered == request_id and is_complete(listing, chunks) then return encode({listing, chunks}) end
    end
  end
  return encode(false)
end

function actions.chunks(listing, first, last)
  local numbers = {}
  for number = first, last do numbers[#numbers + 1] = number end
  return call('HMGET', PREFIX .. 'stage:listing:' .. listing, unpack(numbers))
end

function actions.save_reports(rows)
  for _, row in ipairs(rows) do
    local node, reported_at, text = unpack(row)
    if tonumber(call('HGET', REPORTED_AT, node) or 0) <= reported_at then
      call('HSET', REPORTED_AT, node, string.format('%.6f', reported_at))
      if call('HGET', REPORTS, node) ~= text then
        call('HSET', REPORTS, node, text)
        if call('HINCRBY', POSITIONS, node, 1) <= MOST_POSITIONS then call('RPUSH', REPORT_ORDER, node) end
      end
    end
  end
  for _, key in ipairs({REPORTS, REPORTED_AT, REPORT_ORDER, POSITIONS}) do call('EXPIRE', key, TTL_S) end
  return encode(true)
end

function actions.reports(first, count)
  local names, answer = call('LRANGE', REPORT_ORDER, first, first + count - 1), {}
  for i, text in ipairs(#names > 0 and call('HMGET', REPORTS, unpack(names)) or {}) do
    answer[2 * i - 1], answer[2 * i] = names[i], text
  end
  return answer
end

function actions.extend_rebuild(token, now, lock_s)
  if generation ~= token or is_ready then return encode(false) end
  call('HSET', PREFIX .. 'ledger', 'rebuild_lock_until', now + lock_s)
  return encode(true)
end

function actions.clear()
  local found = call('HKEYS', LISTINGS)
  for _, listing in ipairs(found) do call('UNLINK', PREFIX .. 'stage:listing:' .. listing) end
  call('UNLINK', LISTINGS, REPORTS, REPORTED_AT, REPORT_ORDER, POSITIONS)
  return encode(true)
end

return actions[ARGS[1]](unpack(ARGS, 2))
