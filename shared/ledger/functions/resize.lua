-- Resize leases. Arguments: an action and its arguments. While a lease is locked, only the owner of the token may
-- shrink it. `resize` takes the lease with its new shares as server.tail; it returns {'resized'} and the lease, or,
-- without a change, {'stale', the stored version, 0 without a lease}, {'unlocked'} if the lock has expired, or
-- {'refused', reason, devices, excesses of quotas}. Whatever was resized is marked until node and annotations are
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
local call, encode, struct_pack, struct_unpack = redis.call, cmsgpack.pack, struct.pack, struct.unpack
local D, L, U = layouts.DEVICE, lease.L, layouts.UNSYNCED
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
  return {encode({'refused', reason, rows, excesses or {}})}
end

-- The lease with its new shares: the numbers of the stored one, and a description that ends with the time
-- of the resize, later than that of the one before.
local function resized_value(header, value)
  local new = lease.header_of(value)
  for _, at in ipairs({L.STATE, L.RESERVED_VERSION, L.CREATED, L.EXPIRES}) do new[at] = header[at] end
  new[L.VERSION] = ledger.next_version()
  local last = lease.BYTES + lease.GRANT_BYTES * new[L.SHARE_COUNT] + new[L.DESCRIPTION_BYTES]
  local before = struct_unpack('>d', value, last - 7)
  local at = math.max(server.now_in_ms(), math.floor(before * 1000 + 0.5) + 1) / 1000
  return struct_pack(lease.FORMAT, unpack(new, 1, L.DESCRIPTION_BYTES))
    .. string.sub(value, lease.BYTES + 1, last - 8) .. struct_pack('>d', at) .. string.sub(value, last + 1),
    new[L.VERSION]
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
  local value = records.lease_of(pod)
  local header = value and lease.header_of(value)
  if not header or header[L.VERSION] ~= version then
    return {encode({'stale', header and header[L.VERSION] or 0})}
  end
  if token ~= '' and call('GET', lock_key(pod)) ~= token then return {encode({'unlocked'})} end

  local before, after = lease.demand_of(header, value), lease.demand_of(lease.header_of(server.tail), server.tail)
  local name, is_smaller, changes = before[1], false, {}
  if #server.tail > constants.MOST_LEASE_BYTES then return refused('record-size', before) end
  for d, uuid, device in capacity.each_device(before) do
    local memory, cores = after[d + 1] - before[d + 1], after[d + 2] - before[d + 2]
    local reason = not (after[d + 1] >= 0 and after[d + 2] >= 0) and 'memory'
      or growth_refusal(device, name, memory, cores)
    if reason then return refused(reason .. ' of ' .. uuid, before) end
    if device then changes[device] = {memory, cores} end
    is_smaller = is_smaller or memory < 0 or cores < 0
  end
  local _, _, _, _, namespace = lease.description_of(header, value)
  if ledger.has_quotas then
    local excesses = quota.recharge(pod, namespace, after, is_smaller)
    if excesses then return refused('quota', before, excesses) end
  end
  for device, amounts in pairs(changes) do
    capacity.add_to_device(device, 1, '', amounts[1], amounts[2], 0, 0, 0, 0, '')
  end
  fair.add_demand(namespace, before, -1)
  fair.add_demand(namespace, after, 1)
  records.fetch('nodes', {name})
  if is_smaller then records.mark_freed(name) end
  records.changed_nodes[name] = true
  local new_value, new_version = resized_value(header, server.tail)
  records.put_lease(pod, new_value)
  writes.write_changes('resized')
  call('HSET', UNSYNCED, pod, encode({new_version, server.now_in_ms()}))
  if token ~= '' then call('DEL', lock_key(pod)) end
  tenures.append('ended', {pod, value})
  tenures.append('held', {pod, new_value})
  return {encode({'resized'}), new_value}
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
