-- What may have to be done. Returns {generation, capacity number, highest version, number of vanished pods
-- with leases, instant at which the first reservation expires (0: there is none), number of waiting pods, number
-- of leases to synchronize after a resize, number of preemptions in progress and of planned starts, number of budgets,
-- number of gangs whose verdicts must be decided again}. Binders call it every second, and twice a second while pods
-- wait.
local ledger = require('ledger')
local server = require('server')
local call, encode = redis.call, cmsgpack.pack

return function()
  local first = call('ZRANGE', server.prefix .. 'expiring', 0, 0, 'WITHSCORES')
  local preemptions = call('HLEN', server.beside .. '-preemption:preemptions')
  return encode({ledger.generation, ledger.capacity, ledger.version, call('SCARD', server.prefix .. 'vanished'),
    tonumber(first[2] or 0), call('HLEN', server.prefix .. 'waiting'), call('HLEN', server.prefix .. 'unsynced'),
    preemptions + call('HLEN', server.prefix .. 'starts'), call('HLEN', server.beside .. '-preemption:budgets'),
    call('SCARD', server.prefix .. 'changed-gangs')})
end
