// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	"github.com/google/gopacket"
	"github.com/google/gopacket/layers"
	"github.com/google/gopacket/pcapgo"
)

// errCapture is wrapped by every error about a file that is no capture, is
// damaged, or holds other frames than Ethernet.
var errCapture = errors.New("capture file")

// capture reads the frames of a pcap or pcapng file one after the other. It is
// not safe for concurrent use.
type capture struct {
	next func() ([]byte, gopacket.CaptureInfo, error)
	link func(gopacket.CaptureInfo) layers.LinkType
}

// newCapture reads what comes before the first frame.
func newCapture(r io.Reader) (*capture, error) {
	buf := bufio.NewReaderSize(r, 1<<16)
	magic, err := buf.Peek(4)
	if err != nil {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: too short", errCapture)
	}
	if string(magic) == "\x0a\x0d\x0d\x0a" {
		ng, err := pcapgo.NewNgReader(buf, pcapgo.NgReaderOptions{WantMixedLinkType: true})
		if err != nil {
			return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", errCapture, err)
		}
		return &capture{next: ng.ReadPacketData, link: func(ci gopacket.CaptureInfo) layers.LinkType {
			i, err := ng.Interface(ci.InterfaceIndex)
			if err != nil {
				return layers.LinkTypeNull
			}
			return i.LinkType
		}}, nil
	}
	old, err := pcapgo.NewReader(buf)
	if err != nil {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", errCapture, err)
	}
	return &capture{next: old.ReadPacketData, link: func(gopacket.CaptureInfo) layers.LinkType { return old.LinkType() }}, nil
}

// Next returns the next frame, and the length it had on the wire, which is
// greater where the capture cut it. The error is io.EOF at the end of an
// undamaged file.
func (c *capture) Next() (frame []byte, length int, err error) {
	frame, ci, err := c.next()
	switch {
	case err == io.EOF:
		return nil, 0, io.EOF
	case err != nil:
		return nil, 0, fmt.Errorf("%w: damaged: %w", errCapture, err)
	}
	if l := c.link(ci); l != layers.LinkTypeEthernet {
		return nil, 0, fmt.Errorf("%w: link type %d (%v): rules count from the Ethernet header, so only link type 1 is possible; capture on an Ethernet interface, not on any", errCapture, int(l), l)
	}
	return frame, max(ci.Length, len(frame)), nil
}
