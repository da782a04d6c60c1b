-- The journal of tenures: since when, and until when, leases hold what they hold, by this server's
-- clock (the time in an entry's id). The timekeeper charges from it and cuts it off behind itself.
--   tenures   stream  k: 'held' (bound now), 'restored' (written anew, held since it was made) or
--                     'ended' (now); and the lease as it is, under its pod
local TENURES_KEPT = 50000

-- `told`: pods, each before its lease.
local function journal(kind, told)
  for from = 1, #told, MAX_ARGS do
    call('XADD', P .. 'tenures', 'MAXLEN', '~', TENURES_KEPT, '*', 'k', kind,
      unpack(told, from, math.min(from + MAX_ARGS - 1, #told)))
  end
end
