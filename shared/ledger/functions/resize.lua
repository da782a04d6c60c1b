-- Resize leases. Arguments: an action and its arguments. While a lease is locked, only the owner of the token may
-- shrink it. `resize` takes the lease with its new shares as server.tail; it returns {'resized'} and the lease, or,
-- without a change, {'stale', the stored version, 0 without a lease}, {'unlocked'} if the lock has expired, or
-- {'refused'}, and a RefusalRecord. Whatever was resized is marked until node and annotations are
-- known to have the size of that version, or of a later one.
-- Keys: resize-lock:POD, the token of the lock's owner, which expires; unsynced (hash, pod -> UnsyncedRecord)
local capacity = require('capacity')
local constants = require('constants')
local fair = require('fair')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local quota = require('quota')
local records = require('records')
local server = require('server')
local tenures = require('tenures')
local values = require('values')
local writes = require('writes')
local call, encode = redis.call, cmsgpack.pack
local B, D, DEMAND, U = layouts.BOOKING, layouts.DEVICE, layouts.DEMAND, layouts.UNSYNCED
local NUMBERS, REQUEST = layouts.NUMBERS, layouts.REQUEST
local UNSYNCED
server.on_begin(function() UNSYNCED = server.prefix .. 'unsynced' end)

local function lock_key(pod) return server.prefix .. 'resize-lock:' .. pod end

-- Why a device cannot give so much more, or nil.
local function growth_refusal(device, name, memory, cores)
  if memory <= 0 and cores <= 0 then return nil end
  local reason = capacity.unavailable(device, name)
  if reason then return reason end
  if device[D.IS_CLAIMED] then return 'claimed' end
  local memory_taken, cores_taken = capacity.taken_of(device)
  if memory > 0 and memory_taken + memory > device[D.MEMORY_MIB] then return 'memory' end
  if cores > 0 and cores_taken + cores > 100 then return 'cores' end
end

local function refused(reason, demand, excesses)
  local rows = {}
  capacity.append_device_rows(rows, demand)
  return {encode({'refused'}), encode({reason, rows, {}, excesses or {}, false})}
end

-- Give the lease with new shares the numbers of the stored one, and the time of its resize, later than that of the one
-- before.
local function set_numbers(resized, before)
  local numbers = {unpack(before.numbers)}
  local before_ms = math.floor(numbers[NUMBERS.RESIZED_AT] * 1000 + 0.5)
  numbers[NUMBERS.RESIZED_AT] = math.max(server.now_in_ms(), before_ms + 1) / 1000
  numbers[NUMBERS.VERSION] = ledger.next_version()
  resized.numbers = numbers
  lease.update(resized)
end

local actions = {}

function actions.lock(pod, token, ttl_ms)
  return encode(call('SET', lock_key(pod), token, 'NX', 'PX', ttl_ms) and true or false)
end

function actions.unlock(pod, token)
  local is_ours = call('GET', lock_key(pod)) == token
  if is_ours then call('DEL', lock_key(pod)) end
  return encode(is_ours)
end

function actions.resize(pod, version, token)
  local before, after = records.lease_of(pod), lease.read(server.tail)
  if not before or before.numbers[NUMBERS.VERSION] ~= version then
    return {encode({'stale', before and before.numbers[NUMBERS.VERSION] or 0})}
  end
  if token ~= '' and call('GET', lock_key(pod)) ~= token then return {encode({'unlocked'})} end
  if #server.tail > constants.MOST_LEASE_BYTES then return refused('record-size', before.demand) end
  if not after then return refused('memory', before.demand) end -- of an amount below 0

  local name, is_smaller, changes = before.demand[DEMAND.NODE], false, {}
  local bookings, i = after.demand[DEMAND.BOOKINGS], 0
  for booking, device in capacity.each_device(before.demand) do
    i = i + 1
    local memory = bookings[i][B.MEMORY_MIB] - booking[B.MEMORY_MIB]
    local cores = bookings[i][B.CORES_PERCENT] - booking[B.CORES_PERCENT]
    local reason = growth_refusal(device, name, memory, cores)
    if reason then return refused(reason .. ' of ' .. booking[B.DEVICE], before.demand) end
    if device then changes[device] = {memory, cores} end
    is_smaller = is_smaller or memory < 0 or cores < 0
  end
  local namespace = before.request[REQUEST.NAMESPACE]
  if ledger.has_quotas then
    local excesses = quota.recharge(pod, namespace, after.demand, is_smaller)
    if excesses then return refused('quota', before.demand, excesses) end
  end
  for device, amounts in pairs(changes) do capacity.add_amounts(device, amounts[1], amounts[2]) end
  fair.add_demand(namespace, before.demand, -1)
  fair.add_demand(namespace, after.demand, 1)
  records.fetch('nodes', {name})
  if is_smaller then records.mark_freed(name) end
  records.changed_nodes[name] = true
  set_numbers(after, before)
  records.put_lease(pod, after)
  writes.write_changes('resized')
  call('HSET', UNSYNCED, pod, encode({after.numbers[NUMBERS.VERSION], server.now_in_ms()}))
  if token ~= '' then call('DEL', lock_key(pod)) end
  tenures.append('ended', {pod, before.value})
  tenures.append('held', {pod, after.value})
  return {encode({'resized'}), after.value}
end

function actions.unsynced(older_than_ms, most)
  local pods, now_ms = {}, server.now_in_ms()
  for pod, stored in server.each_record(UNSYNCED, U) do
    local at = stored[U.RESIZED_AT_MS]
    if #pods < most and (at <= now_ms - older_than_ms or at > now_ms) then pods[#pods + 1] = pod end
  end
  return encode(pods)
end

function actions.set_synced(pod, version)
  local stored = values.record(call('HGET', UNSYNCED, pod), U)
  local is_synced = stored and stored[U.VERSION] <= version
  if is_synced then call('HDEL', UNSYNCED, pod) end
  return encode(is_synced and true or false)
end

function actions.set_unsynced(rows)
  for _, row in ipairs(rows) do
    local stored = values.record(call('HGET', UNSYNCED, row[1]), U)
    if not stored or stored[U.VERSION] < row[2] then
      call('HSET', UNSYNCED, row[1], encode({row[2], 0}))
    end
  end
  return encode(true)
end

return function(action, ...) return actions[action](...) end
