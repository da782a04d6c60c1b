-- What several binders collect together, stored beside the ledger until a rebuild begins or it is too old
-- to matter. Arguments, by the first of them:
--   'save_chunk', listing, chunk, chunks, listed_at, text
--                                       save a chunk of a listing; answers all texts once all chunks are
--                                       there, else false
--   'save_reports', rows of {node, reported_at, text}
--                                       save each node's newest report
--   'reports'                           answers a flat list of nodes and texts
--   'listing', since                    answers the texts of the newest complete listing that began at or
--                                       after that instant
--   'extend_rebuild', token, now, lock_s
--                                       extends the lock of the rebuild with that token; answers whether
--                                       the token is still valid
--   'clear'                             deletes listings and reports
local LISTINGS, REPORTS, TTL_S = PREFIX .. 'stage:listings', PREFIX .. 'stage:reports', 600

local function complete_texts(listing, chunks)
  local key = PREFIX .. 'stage:listing:' .. listing
  if call('HLEN', key) < chunks then return false end
  return call('HVALS', key)
end

local actions = {}

function actions.save_chunk(listing, chunk, chunks, at, text)
  local key = PREFIX .. 'stage:listing:' .. listing
  call('HSET', key, chunk, text)
  call('EXPIRE', key, TTL_S)
  call('HSET', LISTINGS, listing, encode({at, chunks}))
  call('EXPIRE', LISTINGS, TTL_S)
  return complete_texts(listing, chunks)
end

function actions.listing(since)
  local found, newest_texts, newest_at = call('HGETALL', LISTINGS), false, since
  for i = 1, #found, 2 do
    local at, chunks = unpack(decode(found[i + 1]))
    if at >= newest_at then
      local texts = complete_texts(found[i], chunks)
      if texts then newest_texts, newest_at = texts, at end
    end
  end
  return newest_texts
end

function actions.save_reports(rows)
  for _, row in ipairs(rows) do
    local stored = call('HGET', REPORTS, row[1])
    if not stored or decode(stored)[1] <= row[2] then
      call('HSET', REPORTS, row[1], encode({row[2], row[3]}))
    end
  end
  call('EXPIRE', REPORTS, TTL_S)
  return true
end

function actions.reports()
  local found = call('HGETALL', REPORTS)
  for i = 2, #found, 2 do found[i] = decode(found[i])[2] end
  return found
end

function actions.extend_rebuild(token, now, lock_s)
  if generation ~= token or is_ready then return false end
  call('HSET', PREFIX .. 'ledger', 'rebuild_lock_until', now + lock_s)
  return true
end

function actions.clear()
  local found = call('HKEYS', LISTINGS)
  for _, listing in ipairs(found) do call('DEL', PREFIX .. 'stage:listing:' .. listing) end
  call('DEL', LISTINGS, REPORTS)
  return true
end

return encode(actions[ARGS[1]](unpack(ARGS, 2)))
