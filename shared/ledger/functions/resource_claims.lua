-- Leases of ResourceClaims. Unlike that of a pod, the uid of a claim may get a lease again. Leases are `deallocated` at
-- the version that was read: like those of vanished pods they end once their node's agent confirms that the claim is
-- not prepared. For new `consumers`, the tail is the lease that has them.
local constants = require('constants')
local lease = require('lease')
local ledger = require('ledger')
local records = require('records')
local server = require('server')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local L = lease.L
local actions = {}

function actions.deallocated(rows)
  local marked = {}
  records.fetch_leases_of(rows)
  for i, row in ipairs(rows) do
    local value = records.leases[row[1]]
    marked[i] = value and lease.header_of(value)[L.VERSION] == row[2] or false
    if marked[i] then call('SADD', server.prefix .. 'vanished', row[1]) end
  end
  return encode(marked)
end

function actions.consumers(claim, version)
  local value = records.lease_of(claim)
  local header = value and lease.header_of(value)
  if not header or header[L.VERSION] ~= version or #server.tail > constants.MOST_LEASE_BYTES then
    return {encode(false)}
  end
  header[L.DESCRIPTION_BYTES] = lease.header_of(server.tail)[L.DESCRIPTION_BYTES]
  header[L.VERSION] = ledger.next_version()
  value = records.put_header(claim, header, server.tail)
  writes.write_changes('consumers')
  return {encode(true), value}
end

return function(action, ...) return actions[action](...) end
