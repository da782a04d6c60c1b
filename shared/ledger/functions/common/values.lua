-- Lists, sets and packed values.
local decode, unpack_limit, byte = cmsgpack.unpack, cmsgpack.unpack_limit, string.byte
local M = {}

function M.append(list, ...)
  for i = 1, select('#', ...) do list[#list + 1] = (select(i, ...)) end
end

function M.set_of(list)
  local set = {}
  for _, name in ipairs(list) do set[name] = true end
  return set
end

-- For each pair of a flat list, its two values.
function M.each_pair(flat)
  local i = -1
  return function()
    i = i + 2
    return flat[i], flat[i + 1]
  end
end

-- Records are read with `unpack_limit`, as lists of values: a table that is made of a list has its size at once, and
-- those that `unpack` makes are enlarged again and again.

-- Whether the first and the last of a record's values have its types: all would take too long, and what damages one
-- value changes how many follow.
local function has_types(record, layout)
  local types, last = layout.TYPES, layout.COUNT
  return type(record[1]) == types[1] and type(record[last]) == types[last]
end
M.has_types = has_types

local function whole_record(layout, is_read, rest, ...)
  if is_read and rest == -1 then
    local record = {...}
    if has_types(record, layout) then return record end
  end
end

-- The record that was packed with this layout, or nil if it is missing or cannot be decoded. Another number of values
-- leaves a rest, or the last one without its type.
function M.record(value, layout)
  if not value or byte(value) ~= layout.FIRST_BYTE then return nil end
  return whole_record(layout, pcall(unpack_limit, value, layout.COUNT, #layout.HEADER))
end

local function record_and_rest(rest, ...) return {...}, rest end

-- The record of this layout, of less than 16 values, that begins at `at` (from 0), and where the rest begins (-1: there
-- is none); or nil if something else begins there. Raises an error if what follows cannot be decoded.
function M.record_at(text, at, layout)
  if byte(text, at + 1) ~= layout.FIRST_BYTE then return nil end
  return record_and_rest(unpack_limit(text, layout.COUNT, at + 1))
end

-- What was packed, or as JSON; {} if it is missing or cannot be read.
function M.readable(value, parse)
  if not value then return {} end
  local is_read, content = pcall(parse or decode, value)
  return is_read and type(content) == 'table' and content or {}
end

return M
