-- Evidence that several binders collect for a rebuild, stored until it begins or the evidence expires.
-- Arguments, by the first of them:
--   'save_chunk', listing, chunk, chunks, request_ids, text
--                                       save a chunk of a listing; returns all texts once it is complete,
--                                       else false
--   'save_reports', rows of {node, reported_at, text}
--                                       save each node's newest report
--   'reported_nodes'                    returns the nodes with a report
--   'reports'                           returns a flat list of nodes and texts
--   'listing', request_id               returns the texts of a complete listing with that ID, or false
--   'extend_rebuild', token, now, lock_s
--                                       extends the lock of the rebuild with that token; returns whether
--                                       the token is still valid
--   'clear'                             deletes listings and reports
local LISTINGS, REPORTS, TTL_S = PREFIX .. 'stage:listings', PREFIX .. 'stage:reports', 600

local function complete_texts(listing, chunks)
  local key = PREFIX .. 'stage:listing:' .. listing
  if call('HLEN', key) < chunks then return false end
  return call('HVALS', key)
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
  return complete_texts(listing, chunks)
end

function actions.listing(request_id)
  local found = call('HGETALL', LISTINGS)
  for i = 1, #found, 2 do
    local request_ids, chunks = unpack(decode(found[i + 1]))
    for _, answered in ipairs(request_ids) do
      local texts = answered == request_id and complete_texts(found[i], chunks)
      if texts then return texts end
    end
  end
  return false
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

function actions.reported_nodes()
  return call('HKEYS', REPORTS)
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
