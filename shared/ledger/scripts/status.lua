-- What may have to be done. Returns {generation, capacity number, highest version, number of vanished pods
-- with leases, instant at which the first reservation expires (0: there is none), number of waiting pods, number
-- of leases to synchronize after a resize, number of preemptions in progress and of planned starts, number of budgets,
-- number of gangs whose verdicts must be decided again}. Binders call it every second, and twice a second while pods wait.
local first = call('ZRANGE', PREFIX .. 'expiring', 0, 0, 'WITHSCORES')
return encode({generation, capacity, last_version, call('SCARD', PREFIX .. 'vanished'), tonumber(first[2] or 0),
  call('HLEN', PREFIX .. 'waiting'), call('HLEN', PREFIX .. 'unsynced'),
  call('HLEN', BESIDE .. '-preemption:preemptions') + call('HLEN', PREFIX .. 'starts'), call('HLEN', BESIDE .. '-preemption:budgets'),
  call('SCARD', PREFIX .. 'changed-gangs')})
