-- What several binders collect together, kept beside the ledger until a rebuild begins or it is too
-- old to matter. Arguments, by the first of them:
--   'piece', listing, piece, pieces, listed_at, text   keep a piece of a listing; answers all texts
--                                                      once all are there, else nothing
--   'reports', rows of {node, reported_at, text}       keep each node's newest report
--   'reported'                                         answers a flat list of nodes and texts
--   'listing', since                                   answers the texts of the newest complete
--                                                      listing begun at or after that instant
--   'hold', token, now, lock_s                         prolongs the lock of the rebuild with that
--                                                      token; answers whether it is still ours
--   'clear'
local LISTINGS, REPORTS, KEEP_S = P .. 'stage:listings', P .. 'stage:reports', 600

local function texts_of(listing, pieces)
  local key = P .. 'stage:listing:' .. listing
  if call('HLEN', key) < pieces then return false end
  return call('HVALS', key)
end

local function keep_piece(listing, piece, pieces, at, text)
  local key = P .. 'stage:listing:' .. listing
  call('HSET', key, piece, text)
  call('EXPIRE', key, KEEP_S)
  call('HSET', LISTINGS, listing, pack({at, pieces}))
  call('EXPIRE', LISTINGS, KEEP_S)
  return texts_of(listing, pieces)
end

local function newest_listing(since)
  local found, best, newest = call('HGETALL', LISTINGS), false, since
  for i = 1, #found, 2 do
    local at, pieces = unpack(decode(found[i + 1]))
    if at >= newest then
      local texts = texts_of(found[i], pieces)
      if texts then best, newest = texts, at end
    end
  end
  return best
end

local function keep_reports(rows)
  for _, row in ipairs(rows) do
    local stored = call('HGET', REPORTS, row[1])
    if not stored or decode(stored)[1] <= row[2] then
      call('HSET', REPORTS, row[1], pack({row[2], row[3]}))
    end
  end
  call('EXPIRE', REPORTS, KEEP_S)
  return true
end

local function kept_reports()
  local found = call('HGETALL', REPORTS)
  for i = 2, #found, 2 do found[i] = decode(found[i])[2] end
  return found
end

local function hold(token, now, lock_s)
  if meta[2] ~= token or meta[1] == '1' then return false end
  call('HSET', P .. 'ledger', 'until', now + lock_s)
  return true
end

local function clear()
  local found = call('HKEYS', LISTINGS)
  for _, listing in ipairs(found) do call('DEL', P .. 'stage:listing:' .. listing) end
  call('DEL', LISTINGS, REPORTS)
  return true
end

local what = A[1]
if what == 'piece' then return pack(keep_piece(A[2], A[3], A[4], A[5], A[6])) end
if what == 'reports' then return pack(keep_reports(A[2])) end
if what == 'reported' then return pack(kept_reports()) end
if what == 'listing' then return pack(newest_listing(A[2])) end
if what == 'hold' then return pack(hold(A[2], A[3], A[4])) end
return pack(clear())
