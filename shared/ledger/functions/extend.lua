-- Keep reservations until a later instant. Arguments: rows of {pod, version that the caller read}, the instant.
-- Returns for each row whether it is kept: false if the lease has moved on, or ended.
local capacity = require('capacity')
local constants = require('constants')
local layouts = require('layouts')
local lease = require('lease')
local records = require('records')
local writes = require('writes')
local NUMBERS = layouts.NUMBERS

return function(rows, expires_at)
  local kept, has_changed = {}, false
  records.fetch_leases_of(rows)
  for i, row in ipairs(rows) do
    local pod, version = row[1], row[2]
    local of_pod = records.leases[pod]
    local numbers = of_pod and of_pod.numbers
    kept[i] = numbers and numbers[NUMBERS.STATE] == constants.RESERVED and numbers[NUMBERS.VERSION] == version or false
    if kept[i] and numbers[NUMBERS.EXPIRES_AT] < expires_at then
      numbers[NUMBERS.EXPIRES_AT] = expires_at
      lease.update(of_pod)
      records.put_lease(pod, of_pod)
      capacity.expire_at(pod, expires_at)
      has_changed = true
    end
  end
  if has_changed then writes.write_changes('extended') end
  return cmsgpack.pack(kept)
end
