-- The journal of tenures: when leases began and ended, by this server's clock (the time in an entry's ID).
-- The timekeeper charges budgets and records costs by it, and trims what it has used for both.
--   tenures   stream  kind: 'held' (bound now), 'restored' (rewritten, held since it was created) or
--                     'ended' (now); and each lease as it is, under its pod
local server = require('server')
local call = redis.call
local MAX_TENURES = 50000

local M = {}

-- `pods_and_leases`: pods, each before its lease.
function M.append(kind, pods_and_leases)
  for from = 1, #pods_and_leases, server.MAX_ARGS do
    call('XADD', server.prefix .. 'tenures', 'MAXLEN', '~', MAX_TENURES, '*', 'kind', kind,
      unpack(pods_and_leases, from, math.min(from + server.MAX_ARGS - 1, #pods_and_leases)))
  end
end

return M
