// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"fmt"
	"math/bits"
	"strings"
)

// Field is a word of the frame under a mask.
type Field struct {
	Index int    // 32-bit word, counted from frame byte 0; 0..MaxIndex
	Mask  uint32 // not 0
}

// Need returns the number of bytes a frame must have to carry the field.
func (f Field) Need() int { return need(f.Index, f.Mask) }

// Word returns the word under the mask, unshifted, and false if the frame does
// not have every byte that the mask selects. Keys are made of these.
func (f Field) Word(frame []byte) (uint32, bool) { return masked(frame, f.Index, f.Mask) }

// Number returns the word under the mask, shifted down by the trailing zeros of
// the mask, and false if the frame does not have every byte that the mask
// selects. Offsets and lengths are read this way.
func (f Field) Number(frame []byte) (uint32, bool) {
	v, ok := f.Word(frame)
	return v >> bits.TrailingZeros32(f.Mask), ok
}

func (f Field) validate(name string) error {
	if f.Index < 0 || f.Index > MaxIndex {
		return fmt.Errorf("%s: word %d is out of range: want 0 to %d", name, f.Index, MaxIndex)
	}
	if f.Mask == 0 {
		return fmt.Errorf("%s: mask 0 on word %d selects nothing", name, f.Index)
	}
	return nil
}

// Length says where the payload of a frame ends: at From + Number, counted from
// frame byte 0. What follows is padding.
type Length struct {
	Field
	From int // frame byte that the length is counted from
}

// Format says how a frame tells which message it belongs to, and where in it.
type Format struct {
	Name       string
	Key        []Field // at most MaxKey; none: every frame of the context has the same key
	Offset     *Field  // byte offset of the payload in its message. Optional: nil means 0
	Length     *Length // end of the payload. Optional: nil means the end of the frame
	EOM        *Rule   // holds for the last packet of a message. Optional: nil never holds
	Header     int     // bytes of the frame before the payload
	UserHeader int     // bytes of user header at the start of the first payload of a message
}

// maxHeader bounds Header, UserHeader and Length.From. It is where the last word
// ends that a rule or key can have.
const maxHeader = 4 * (MaxIndex + 1)

// Validate returns an error wrapping ErrFormat, and ErrRule where the EOM rule
// is at fault.
func (f *Format) Validate() error {
	if msg := badName(f.Name); msg != "" {
		return fmt.Errorf("%w: %s", ErrFormat, msg)
	}
	if n := len(f.Key); n > MaxKey {
		return fmt.Errorf("%w %s: %d key words: want at most %d", ErrFormat, f.Name, n, MaxKey)
	}
	for i, k := range f.Key {
		if err := k.validate(fmt.Sprintf("key word %d", i)); err != nil {
			return fmt.Errorf("%w %s: %w", ErrFormat, f.Name, err)
		}
	}
	if f.Offset != nil {
		if err := f.Offset.validate("offset"); err != nil {
			return fmt.Errorf("%w %s: %w", ErrFormat, f.Name, err)
		}
	}
	if f.Length != nil {
		if err := f.Length.validate("length"); err != nil {
			return fmt.Errorf("%w %s: %w", ErrFormat, f.Name, err)
		}
		if f.Length.From < 0 || f.Length.From > maxHeader {
			return fmt.Errorf("%w %s: length: counted from byte %d, want 0 to %d", ErrFormat, f.Name, f.Length.From, maxHeader)
		}
	}
	if f.EOM != nil {
		if err := f.EOM.Validate(); err != nil {
			return fmt.Errorf("%w %s: EOM rule: %w", ErrFormat, f.Name, err)
		}
	}
	if f.Header < 0 || f.Header > maxHeader {
		return fmt.Errorf("%w %s: header of %d bytes, want 0 to %d", ErrFormat, f.Name, f.Header, maxHeader)
	}
	if f.UserHeader < 0 || f.UserHeader > maxHeader {
		return fmt.Errorf("%w %s: user header of %d bytes, want 0 to %d", ErrFormat, f.Name, f.UserHeader, maxHeader)
	}
	return nil
}

// Ends reports whether messages can have several packets and end. That takes a key, and
// an EOM rule that can hold.
func (f *Format) Ends() bool { return len(f.Key) > 0 && f.EOM != nil && *f.EOM != False }

// Need returns the length of the shortest frame that is not malformed: it holds
// the header, and every byte that the key, offset and length masks select.
func (f *Format) Need() int {
	n := f.Header
	for _, k := range f.Key {
		n = max(n, k.Need())
	}
	if f.Offset != nil {
		n = max(n, f.Offset.Need())
	}
	if f.Length != nil {
		n = max(n, f.Length.Need())
	}
	return n
}

// read reads key and offset of a frame into the verdict. It returns false for a
// malformed frame: one shorter than Need, or one whose Length lies beyond the end
// of the frame or within the header.
func (f *Format) read(frame []byte, v *Verdict) bool {
	if len(frame) < f.Need() {
		return false
	}
	if f.Length != nil {
		n, _ := f.Length.Number(frame)
		end := uint64(f.Length.From) + uint64(n)
		if end > uint64(len(frame)) || end < uint64(f.Header) {
			return false
		}
	}
	for i, k := range f.Key {
		v.Key[i], _ = k.Word(frame)
	}
	v.NKey = len(f.Key)
	if f.Offset != nil {
		v.Offset, _ = f.Offset.Number(frame)
	}
	return true
}

// The predefined formats. Each call of make returns a new one, which its caller may
// change.
var formats = []struct {
	name string
	make func() *Format
}{
	// Every frame is a whole message.
	{"packet", func() *Format {
		eom := Empty
		return &Format{Name: "packet", EOM: &eom, Header: 14}
	}},
	// One message for each IPv4 5-tuple, and it never ends: protocol, source
	// and destination address, source and destination port.
	{"flow", func() *Format {
		eom := False
		return &Format{
			Name:   "flow",
			Key:    []Field{{5, 0xff}, {6, 0xffff}, {7, 0xffffffff}, {8, 0xffffffff}, {9, 0xffff0000}},
			EOM:    &eom,
			Header: 14,
		}
	}},
	// FPsPIN's SLMP over UDP over IPv4 without options. The key is the sender
	// (address and port) and the message id; the flag EOM is 0x8000 of bytes
	// 42-43. The end comes from the UDP length (bytes 38-39), because small
	// frames are padded to 60 bytes on the wire.
	{"slmp", func() *Format {
		return &Format{
			Name:   "slmp",
			Key:    []Field{{6, 0xffff}, {7, 0xffff0000}, {8, 0xffff}, {11, 0xffffffff}},
			Offset: &Field{12, 0xffffffff},
			Length: &Length{Field: Field{9, 0xffff}, From: 34},
			EOM:    &Rule{10, 0x8000, 0x8000, 0x8000},
			Header: 52,
		}
	}},
	// The same over IPv6 without extension headers. The sender's address takes
	// five key words (bytes 22-37).
	{"slmp6", func() *Format {
		return &Format{
			Name: "slmp6",
			Key: []Field{
				{5, 0xffff}, {6, 0xffffffff}, {7, 0xffffffff}, {8, 0xffffffff}, {9, 0xffff0000},
				{13, 0xffff}, {16, 0xffffffff},
			},
			Offset: &Field{17, 0xffffffff},
			Length: &Length{Field: Field{14, 0xffff}, From: 54},
			EOM:    &Rule{15, 0x8000, 0x8000, 0x8000},
			Header: 72,
		}
	}},
}

// FormatByName returns a copy of a predefined message format: "packet", "flow",
// "slmp" or "slmp6". It returns nil for any other name.
func FormatByName(name string) *Format {
	for _, f := range formats {
		if f.name == name {
			return f.make()
		}
	}
	return nil
}

// FormatNames returns the names that FormatByName knows.
func FormatNames() []string {
	names := make([]string, len(formats))
	for i, f := range formats {
		names[i] = f.name
	}
	return names
}

func unknownFormat(name string) string {
	return fmt.Sprintf("no message format %q: want %s", name, strings.Join(FormatNames(), ", "))
}
