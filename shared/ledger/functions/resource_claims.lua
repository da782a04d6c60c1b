-- Leases of ResourceClaims. Unlike that of a pod, the uid of a claim may get a lease again. Leases are `deallocated` at
-- the version that was read: like those of vanished pods they end once their node's agent confirms that the claim is
-- not prepared. For new `consumers`, the tail is the lease that has them.
local constants = require('constants')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local NUMBERS = layouts.NUMBERS
local actions = {}

function actions.deallocated(rows)
  local marked = {}
  records.fetch_leases_of(rows)
  for i, row in ipairs(rows) do
    local of_claim = records.leases[row[1]]
    marked[i] = of_claim and of_claim.numbers[NUMBERS.VERSION] == row[2] or false
    if marked[i] then call('SADD', server.prefix .. 'vanished', row[1]) end
  end
  return encode(marked)
end

function actions.consumers(claim, version)
  local of_claim, changed = records.lease_of(claim), lease.read(server.tail)
  if not of_claim or of_claim.numbers[NUMBERS.VERSION] ~= version or #server.tail > constants.MOST_LEASE_BYTES then
    return {encode(false)}
  end
  changed.numbers = of_claim.numbers
  changed.numbers[NUMBERS.VERSION] = ledger.next_version()
  lease.update(changed)
  records.put_lease(claim, changed)
  writes.write_changes('consumers')
  return {encode(true), changed.value}
end

return function(action, ...) return actions[action](...) end
